"""Pictures: in words too, in colours that most colour-blind eyes tell apart, readable on a light and a dark page."""

from __future__ import annotations

import base64
import html
import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design", 2008. Yellow is left out: it cannot be seen on white.
ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY)
INK = "#7d7d7d"  # at least 4:1 against white and against a dark page


class Picture:
    """A picture with its words, for `display`. The SVG travels in an <img>, which needs no trust and no kernel."""

    def __init__(self, svg: str, alt: str):
        if not alt.strip():
            raise ValueError("alt is empty; say in words what the picture shows")
        self.svg = svg
        self.alt = alt

    def __repr__(self) -> str:
        return f"[picture: {self.alt}]"

    def _repr_html_(self) -> str:
        return figure(self.svg, self.alt)


def figure(svg: str, alt: str) -> str:
    """An HTML figure that shows `svg` anywhere HTML is shown."""
    # An <img> does not inherit the page's text colour, so a picture drawn in it gets one that both themes can read.
    data = base64.b64encode(svg.replace("currentColor", INK).encode()).decode()
    text = html.escape(alt, quote=True)
    return f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}" style="max-width:100%"></figure>'


def style() -> dict[Any, Any]:
    """matplotlib's settings for the lessons; `with matplotlib.rc_context(lab.style()):`"""
    from cycler import cycler

    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor"), INK
    )
    return ink | {
        "axes.prop_cycle": cycler(color=COLOURS) + cycler(linestyle=["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "font.size": 11,
        "lines.linewidth": 2,
        "svg.fonttype": "path",  # the same picture whatever fonts the reader has
        "svg.hashsalt": "labkit",  # the same bytes every time
    }


def show(fig: Figure, alt: str) -> Picture:
    """The figure as a picture with `alt` for those who cannot see it. The figure is closed."""
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    with plt.rc_context(style()):
        fig.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(fig)
    svg = buffer.getvalue()
    svg = re.sub(r"<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return Picture(svg, alt)
