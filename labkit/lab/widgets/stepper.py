"""A slider over the steps of something that happened, and a picture of each step."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.lab.show import figure

# JupyterLab prefers the live widget of a bundle, and when the page is loaded again without that kernel it writes "Error
# displaying widget" in its place, in an element that holds nothing else. This second output is hidden until then: its
# rules hide the error and show the picture.
FALLBACK_CLASS = "lab-fallback"
ERROR_OUTPUT = ".jp-OutputArea-child:has(.jupyter-widgets):not(:has(.jupyter-widgets *))"
FALLBACK = (
    f'<div class="{FALLBACK_CLASS}" hidden>{{static}}</div><style>'
    f"{ERROR_OUTPUT}:has(+ * .{FALLBACK_CLASS}) {{{{ display: none }}}} "
    f"{ERROR_OUTPUT} + * .{FALLBACK_CLASS} {{{{ display: block !important }}}}"
    "</style>"
)


@dataclass(frozen=True)
class Frame:
    """One step, drawn: the picture, and the same in words."""

    svg: str
    words: str


class Stepper:
    """Shows `render(data, step)` for the step that the slider is on; arrow keys move it.

    Args:
        render: pure: the same data and step give the same frame.
        labels: what the slider says at each step; their number is the number of steps.
        name: what the slider chooses, in one or two words.
        start: the step that is shown first, and where no kernel runs.
    """

    def __init__(
        self,
        render: Callable[[Any, int], Frame],
        data: Any,
        labels: Sequence[str],
        name: str,
        start: int = 0,
    ):
        import ipywidgets as widgets

        self._render = render
        self._data = data
        self.name = name
        self.slider = widgets.SelectionSlider(
            options=[(label, step) for step, label in enumerate(labels)],
            value=start,
            description=name,
            continuous_update=True,
            style={"description_width": "initial"},
            layout=widgets.Layout(width="min(100%, 36em)"),
        )
        self.picture = widgets.HTML(self._live(start))
        self.slider.observe(self._moved, names="value")
        self.box = widgets.VBox([self.slider, self.picture])

    def frame(self, step: int) -> Frame:
        return self._render(self._data, step)

    def _moved(self, change: dict[str, Any]) -> None:
        self.picture.value = self._live(change["new"])

    def _live(self, step: int) -> str:
        frame = self.frame(step)
        words = html.escape(frame.words, quote=True)
        # The SVG is part of the page here, so currentColor is the theme's own; a screen reader hears each change.
        svg = frame.svg.replace("<svg ", f'<svg role="img" aria-label="{words}" ', 1)
        return (
            f'<figure aria-label="{html.escape(self.name)}: arrow keys move the slider" style="margin:0;'
            f'color:var(--jp-content-font-color1, inherit)">{svg}'
            f'<figcaption aria-live="polite">{words}</figcaption></figure>'
        )

    def __repr__(self) -> str:
        return f"[{self.name}: {self.frame(self.slider.value).words}]"

    def static_html(self) -> str:
        """The step it stands on, as a picture for pages where no kernel runs."""
        frame = self.frame(self.slider.value)
        caption = f"{html.escape(frame.words)} (Run this cell to move the slider.)"
        return figure(frame.svg, frame.words).replace("</figure>", f"<figcaption>{caption}</figcaption></figure>")

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        display(self._repr_mimebundle_(), raw=True)
        display(HTML(FALLBACK.format(static=self.static_html())))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        live = self.box._repr_mimebundle_() or {}
        return {**live, "text/plain": repr(self), "text/html": self.static_html()}
