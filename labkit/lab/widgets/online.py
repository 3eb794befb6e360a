"""Attention tile by tile: which scores are looked at, and what is known of each query after it.

            key 0   1     2     3     4     5                m      l     × before    o
query 2     0.3  -1.2 │ 2.1     ╌     ╌     ╌               2.1   1.21     0.17       0.4  -0.9
query 3     …         │
"""

from __future__ import annotations

from labkit.lab.online import Online
from labkit.lab.show import BLUE, INK, VERMILLION
from labkit.lab.widgets import svg
from labkit.lab.widgets.stepper import Frame, Stepper

WIDTH, LEFT, TOP, BOX, HIGH = 720, 70, 46, 38, 28
COLUMN = 52  # of a number beside the scores
MOST_KEYS, MOST_ROWS, MOST_DIM = 8, 6, 2


def number(value: float) -> str:
    """Two digits behind the point; what is not there yet is a dash."""
    return "–" if value in (float("inf"), float("-inf")) else f"{value:.2f}"


def draw_scores(online: Online, step: int) -> list[str]:
    begin, end = online.tiles[step]
    parts = []
    for key in range(online.scores.shape[1]):
        parts.append(svg.text(LEFT + (key + 0.5) * BOX, TOP - 8, str(key), anchor="middle"))
    for row, scores in enumerate(online.scores.tolist()):
        y = TOP + row * HIGH
        parts.append(svg.text(0, y + 19, f"query {online.scores.shape[1] - online.scores.shape[0] + row}"))
        for key, score in enumerate(scores):
            seen, now = bool(online.seen[row, key]), begin <= key < end
            fill = 0.0 if key >= end or not seen else 0.45 if now else 0.12
            colour = BLUE if fill else INK
            x = LEFT + key * BOX
            parts.append(svg.box(x, y, BOX, HIGH, colour=colour, fill=fill, dash="" if seen else "3 3"))
            if now and seen:
                parts.append(svg.text(x + BOX / 2, y + 19, f"{score:.1f}", anchor="middle"))
    return parts


def draw_states(online: Online, step: int) -> list[str]:
    m, l, o = (x.tolist() for x in online.states[step + 1])
    shrink = online.shrink(step).tolist()
    x = LEFT + online.scores.shape[1] * BOX + 34
    heads = ["m", "l", "× before", *(f"o {d}" for d in range(len(o[0])))]
    parts = [svg.text(x + i * COLUMN, TOP - 8, head, anchor="middle") for i, head in enumerate(heads)]
    for row in range(len(m)):
        y = TOP + row * HIGH + 19
        values = [number(m[row]), number(l[row]), f"{shrink[row]:.2f}", *map(number, o[row])]
        for i, value in enumerate(values):
            parts.append(svg.text(x + i * COLUMN, y, value, anchor="middle"))
        if shrink[row] < 1:
            parts.append(svg.box(x + 2 * COLUMN - 24, y - 16, 48, 22, colour=VERMILLION))
    return parts


def in_words(online: Online, step: int) -> str:
    begin, end = online.tiles[step]
    keys = f"key {begin}" if end - begin == 1 else f"keys {begin} to {end - 1}"
    first = online.scores.shape[1] - online.scores.shape[0]
    larger = [f"query {first + row} × {by:.2f}" for row, by in enumerate(online.shrink(step).tolist()) if by < 1]
    if step == 0:
        return f"Tile 0, {keys}: there was nothing before it."
    if not larger:
        return f"Tile {step}, {keys}: no larger score came, so what was known stays as it is."
    return f"Tile {step}, {keys}: a larger score came. What was known before is multiplied: {', '.join(larger)}."


def render(online: Online, step: int) -> Frame:
    """All scores, and what is known after tile `step`."""
    parts = [svg.text(0, 14, "scores; dashed: in the query's future"), *draw_scores(online, step)]
    return Frame(
        svg.svg(WIDTH, TOP + online.scores.shape[0] * HIGH + 10, [*parts, *draw_states(online, step)]),
        in_words(online, step),
    )


def widget(online: Online, start: int = 0) -> Stepper:
    """A slider over the tiles.

    Raises:
        ValueError: there is too much to be drawn.
    """
    (rows, keys), head_dim = online.scores.shape, online.states[0][2].shape[1]
    if keys > MOST_KEYS or rows > MOST_ROWS or head_dim > MOST_DIM:
        raise ValueError(
            f"{rows} queries, {keys} keys, heads of {head_dim} numbers; {MOST_ROWS}, {MOST_KEYS} and {MOST_DIM} at "
            "most can be drawn"
        )
    labels = [f"tile {n}: keys {begin} to {end - 1}" for n, (begin, end) in enumerate(online.tiles)]
    return Stepper(render, online, labels, "tile", start)
