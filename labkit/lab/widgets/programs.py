"""A kernel's launch, access by access: which program, which lanes, which numbers, and what the mask keeps out.

x          0 1 2 3 4 5 ┊6┊7┊     a box for each number, a row for each row of the tensor
                                 lane numbers where lanes load or store now; dashed where the mask stops a lane
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.lab.programs import Access, Trace
from labkit.lab.show import BLUE, GREEN, INK, ORANGE, VERMILLION
from labkit.lab.widgets import svg
from labkit.lab.widgets.stepper import Frame, Stepper

WIDTH, LEFT, TOP = 680, 14, 64  # TOP: the programs' row and the line of code
BOX, HIGH, HEAD, GAP = 34, 26, 24, 18
COLOURS = {"load": BLUE, "store": ORANGE}


def shape_of(trace: Trace, tensor: str) -> tuple[int, int]:
    """(rows, columns) in which a tensor is drawn."""
    columns = (trace.shapes[tensor] or (1,))[-1]
    return trace.size(tensor) // max(columns, 1), columns


def count(lanes: Sequence[int]) -> str:
    """[6, 7] is "lanes 6 to 7"."""
    return f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {lanes[0]} to {lanes[-1]}"


def stray(trace: Trace, access: Access) -> list[int]:
    """Lanes that take part, and work on another row than the first lane's, or behind the tensor's end."""
    _, columns = shape_of(trace, access.tensor)
    row = access.places[0] // columns
    return [n for n, (p, on) in enumerate(zip(access.places, access.mask)) if on and p // columns != row]


def in_words(trace: Trace, access: Access) -> str:
    _, columns = shape_of(trace, access.tensor)
    row = f", row {access.places[0] // columns}" if len(trace.shapes[access.tensor]) > 1 else ""
    away = "loads from" if access.kind == "load" else "stores into"
    text = f"Program {access.program} {away} {access.tensor}{row}: {len(access.used())} of {len(access.mask)} lanes."
    if off := [number for number, on in enumerate(access.mask) if not on]:
        text += f" The mask stops {count(off)}."
    if lost := stray(trace, access):
        text += f" No mask stops {count(lost)}, and what is there is not this row's."
    return text


def draw_programs(trace: Trace, access: Access) -> list[str]:
    parts = [svg.text(LEFT, 23, "program")]
    for program in range(trace.programs):
        x = LEFT + 64 + program * (BOX + 4)
        now = program == access.program
        parts.append(svg.box(x, 6, BOX, HIGH, colour=GREEN if now else "currentColor", fill=0.35 if now else 0))
        parts.append(svg.text(x + BOX / 2, 24, str(program), anchor="middle"))
    parts.append(svg.text(LEFT, 54, access.line, code=True))
    return parts


class Grid:
    """Where the boxes of one tensor stand."""

    def __init__(self, trace: Trace, tensor: str, x: float, y: float):
        self.tensor, self.x, self.y = tensor, x, y
        self.rows, self.columns = shape_of(trace, tensor)

    def at(self, place: int, row: int | None = None) -> tuple[float, float]:
        """The corner of a number's box; of a lane that leaves its `row`, beside that row."""
        row = place // self.columns if row is None else row
        return self.x + (place - row * self.columns) * BOX, self.y + HEAD + row * HIGH

    def draw(self, seen: dict[int, str], access: Access) -> list[str]:
        """`seen`: what happened to a place in earlier accesses."""
        kind = access.kind if access.tensor == self.tensor else ""
        parts = [svg.text(self.x, self.y + 15, f"{self.tensor}: {kind}" if kind else self.tensor)]
        for place in range(self.rows * self.columns):
            x, y = self.at(place)
            if place in seen:
                parts.append(svg.box(x, y, BOX, HIGH, colour=COLOURS[seen[place]], fill=0.15))
            else:
                parts.append(svg.box(x, y, BOX, HIGH, colour=INK))
        return parts + (self.draw_lanes(access) if kind else [])

    def draw_lanes(self, access: Access) -> list[str]:
        parts, first = [], access.places[0] // self.columns
        for lane, (place, on) in enumerate(zip(access.places, access.mask)):
            x, y = self.at(place, None if on and place < self.rows * self.columns else first)
            lost = on and place // self.columns != first
            colour = VERMILLION if lost else COLOURS[access.kind] if on else INK
            parts.append(svg.box(x, y, BOX, HIGH, colour=colour, fill=0.5 if on else 0, dash="" if on else "3 3"))
            parts.append(
                svg.text(x + BOX / 2, y + 18, f"{lane}!" if lost else str(lane) if on else "–", anchor="middle")
            )
        return parts


def grids(trace: Trace) -> tuple[list[Grid], int]:
    """Two tensors side by side, and the height of all."""
    found: list[Grid] = []
    y = tallest = 0
    for number, tensor in enumerate(trace.shapes):
        if number % 2 == 0:
            y, tallest = y + tallest, 0
        found.append(Grid(trace, tensor, LEFT + (number % 2) * WIDTH / 2, TOP + y))
        tallest = max(tallest, HEAD + found[-1].rows * HIGH + GAP)
    return found, TOP + y + tallest


def render(trace: Trace, step: int) -> Frame:
    """The launch up to access `step`, which is the one with lane numbers."""
    access = trace.accesses[step]
    all_grids, height = grids(trace)
    parts = draw_programs(trace, access)
    for grid in all_grids:
        seen = {p: a.kind for a in trace.accesses[:step] if a.tensor == grid.tensor for p in a.used()}
        parts += grid.draw(seen, access)
    return Frame(svg.svg(WIDTH, height, parts), in_words(trace, access))


def widget(trace: Trace, start: int = 0) -> Stepper:
    """The launch with a slider over its loads and stores.

    Raises:
        ValueError: the kernel loads and stores nothing, or its rows are too wide to be drawn.
    """
    if not trace.accesses:
        raise ValueError("this kernel loads nothing and stores nothing: there is nothing to show")
    lanes = max(len(access.places) for access in trace.accesses)
    if lanes > 8 or trace.programs > 12:
        raise ValueError(f"{trace.programs} programs of {lanes} lanes; at most 12 programs of 8 lanes can be drawn")
    labels = [f"program {access.program}: {access.kind} {access.tensor}" for access in trace.accesses]
    return Stepper(render, trace, labels, "access", start)
