"""The few SVG shapes that the widgets need. Text and lines take the page's colour unless told otherwise."""

from __future__ import annotations

import html


def text(x: float, y: float, words: str, *, anchor: str = "start", code: bool = False) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    family = ' font-family="ui-monospace,monospace"' if code else ""
    return f'<text {place}{family} font-size="{12 if code else 13}" fill="currentColor">{html.escape(words)}</text>'


def line(points: list[tuple[float, float]], *, colour: str = "currentColor", width: float = 1, dash: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def ring(x: float, y: float, radius: float, *, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="none" stroke="{colour}" stroke-width="4"/>'


def diamond(x: float, y: float, radius: float, *, colour: str) -> str:
    places = f"{x:.1f},{y - radius:.1f} {x + radius:.1f},{y:.1f} {x:.1f},{y + radius:.1f} {x - radius:.1f},{y:.1f}"
    return f'<polygon points="{places}" fill="{colour}"/>'


def box(
    x: float, y: float, width: float, height: float, *, colour: str = "currentColor", fill: float = 0, dash: str = ""
) -> str:
    """A rectangle; `fill` is how strongly its colour fills it, from 0 to 1."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<rect {place} fill="{colour}" fill-opacity="{fill}" stroke="{colour}"{dashes}/>'


def svg(width: int, height: int, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="max-width:100%;height:auto;font-family:system-ui,sans-serif">{"".join(parts)}</svg>'
    )
