"""The program stepper draws what the trace holds: lanes, masks, and lanes that no mask stops."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

from labkit.lab.exercises import find_exercise
from labkit.lab.programs import Trace, trace
from labkit.lab.show import VERMILLION
from labkit.lab.widgets.programs import render, widget


def traced(id: str = "01.3", wrong: str = "", rows: int = 3, width: int = 5, block: int = 8) -> Trace:
    exercise = find_exercise(id)
    source = next(w.source for w in exercise.wrong if w.name == wrong) if wrong else exercise.solution
    streams = [torch.ones(rows, width) for _ in range(2 if id == "01.4" else 1)]
    out = torch.zeros(rows, width)
    return trace(exercise.define(source), (rows,), *streams, torch.ones(width), out, width, 1e-6, BLOCK=block)


def test_render_is_pure_and_true() -> None:
    data = traced()
    frames = [render(data, step) for step in range(len(data.accesses))]
    assert frames == [render(data, step) for step in range(len(data.accesses))]
    assert len({frame.svg for frame in frames}) == len(frames)
    for frame in frames:
        ET.fromstring(frame.svg)
    assert frames[3].words == "Program 1 loads from x, row 1: 5 of 8 lanes. The mask stops lanes 5 to 7."
    assert frames[1].words == "Program 0 loads from weight: 5 of 8 lanes. The mask stops lanes 5 to 7."
    assert frames[5].words.startswith("Program 1 stores into out, row 1: ")
    assert frames[3].svg.count(">–<") == 3, "a dash for each masked lane"
    assert VERMILLION not in frames[3].svg


def test_lanes_that_no_mask_stops() -> None:
    frame = render(traced(wrong="no mask at the load"), 0)
    assert frame.words == (
        "Program 0 loads from x, row 0: 8 of 8 lanes. No mask stops lanes 5 to 7, and what is there is not this row's."
    )
    assert [lane in frame.svg for lane in (">4!<", ">5!<", ">7!<")] == [False, True, True]
    assert frame.svg.count(VERMILLION) == 6, "fill and edge of three boxes"


@pytest.mark.parametrize("data", [traced(), traced("01.4", "no masks"), traced(rows=12, width=8)])
def test_every_box_is_inside_the_picture(data: Trace) -> None:
    for step in range(len(data.accesses)):
        svg = render(data, step).svg
        _, _, width, height = map(float, re.search(r'viewBox="([^"]+)"', svg).group(1).split())  # type: ignore[union-attr]
        for x, y, w, h in re.findall(r'<rect x="([-\d.]+)" y="([-\d.]+)" width="([-\d.]+)" height="([-\d.]+)"', svg):
            assert 0 <= float(x) <= width - float(w)
            assert 0 <= float(y) <= height - float(h)


def test_widget_moves() -> None:
    shown = widget(traced(), start=3)
    assert "Program 1 loads from x" in shown.picture.value
    shown.slider.value = 5
    assert "Program 1 stores into out" in shown.picture.value
    assert shown.slider.label == "program 1: store out"


def test_refusals() -> None:
    def nothing(x: Any) -> None:
        pass

    with pytest.raises(ValueError, match="loads nothing"):
        widget(trace(nothing, (1,), torch.zeros(3)))
    with pytest.raises(ValueError, match="at most 12 programs of 8 lanes"):
        widget(traced(width=9, block=16))
    with pytest.raises(ValueError, match="13 programs"):
        widget(traced(rows=13))
