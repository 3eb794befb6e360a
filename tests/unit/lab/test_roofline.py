"""The learner's points last over lessons, sessions and bad files; the widget draws them and nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from labkit.lab.machine import Machine
from labkit.lab.roofline import Roofline
from labkit.lab.widgets.roofline import Data as RooflineData
from labkit.lab.widgets.roofline import Setting, render, widget

MACHINE = Machine("cpu", "Test CPU", 4, 2, 8 << 30)
SETTINGS = [
    Setting("write, 1 stream", 2e8, 4e8, 1),
    Setting("write, 8 streams", 16e8, 4e8, 8),
    Setting("read", 1e11, 4e8, 256),
]


def make(path: Path, lesson: str = "00", machine: Machine = MACHINE) -> Roofline:
    return Roofline(path / "lab" / "roofline.json", machine, lesson)


def test_points_last(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.set_limits(10e9, 100e9)
    first.add("write", flops=2e8, bytes=4e8, seconds=0.05)
    later = make(tmp_path, lesson="04")
    assert later.limits() == (10e9, 100e9)
    assert later.ridge == 10
    assert [(p.lesson, p.name, p.intensity, p.flop_rate) for p in later.points] == [("00", "write", 0.5, 4e9)]
    later.add("write", flops=2e8, bytes=4e8, seconds=0.04)
    assert [(p.lesson, p.name) for p in make(tmp_path).points] == [("00", "write"), ("04", "write")]


def test_running_a_cell_again_replaces_its_point(tmp_path: Path) -> None:
    roofline = make(tmp_path)
    roofline.add("write", flops=1, bytes=1, seconds=1)
    roofline.add("write", flops=1, bytes=1, seconds=2)
    assert [p.seconds for p in make(tmp_path).points] == [2]


def test_machines_are_kept_apart(tmp_path: Path) -> None:
    make(tmp_path).set_limits(1, 2)
    other = make(tmp_path, machine=dataclasses.replace(MACHINE, threads=1))
    assert other.bandwidth is None
    other.set_limits(3, 4)
    assert make(tmp_path).limits() == (1, 2)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 99}', '{"version": 1, "machines": {"Test CPU, 2 threads": {"points": [{"x": 1}]}}}'],
)
def test_a_bad_file_does_not_fail_a_lesson(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lab" / "roofline.json"
    path.parent.mkdir()
    path.write_text(content)
    roofline = make(tmp_path)
    assert roofline.points == []
    roofline.set_limits(1, 2)
    assert json.loads(path.read_text())["version"] == 1
    assert os.listdir(path.parent) == ["roofline.json"], "nothing half written lies about"


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab").write_text("a file, where the folder should be")
    roofline = make(tmp_path)
    roofline.set_limits(1, 2)
    assert roofline.limits() == (1, 2)
    assert "not kept" in capsys.readouterr().out


def test_limits_must_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not measured yet"):
        widget(make(tmp_path), SETTINGS)


def measured(tmp_path: Path) -> Roofline:
    roofline = make(tmp_path)
    roofline.set_limits(10e9, 100e9)
    roofline.add("write 1", flops=2e8, bytes=4e8, seconds=0.05)
    roofline.add("a <b> & c", flops=2e10, bytes=4e8, seconds=0.4)
    return roofline


def test_render_is_pure_and_true(tmp_path: Path) -> None:
    roofline = measured(tmp_path)
    data = RooflineData("m", 10e9, 100e9, tuple(roofline.points), tuple(SETTINGS))
    frames = [render(data, step) for step in range(3)]
    assert frames == [render(data, step) for step in range(3)]
    assert len({frame.svg for frame in frames}) == 3
    for frame in frames:
        ET.fromstring(frame.svg)  # well formed, names escaped
    assert frames[0].words == (
        "write, 1 stream: 0.5 FLOPs a byte. At least 40 ms for 1 token, 25 tokens/s at best. The limit is memory."
    )
    assert frames[1].words.endswith("At least 40 ms for 8 tokens, 200 tokens/s at best. The limit is memory.")
    assert frames[2].words.endswith("The limit is compute.")


def test_every_place_is_inside_the_picture(tmp_path: Path) -> None:
    data = RooflineData("m", 4.3e12, 790e12, tuple(measured(tmp_path).points), tuple(SETTINGS))
    for step in range(3):
        svg = render(data, step).svg
        _, _, width, height = map(float, re.search(r'viewBox="([^"]+)"', svg).group(1).split())  # type: ignore[union-attr]
        for x, y in re.findall(r'<(?:circle cx|text x)="([-\d.]+)" c?y="([-\d.]+)"', svg):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


def test_widget_moves_and_stands_still(tmp_path: Path) -> None:
    shown = widget(measured(tmp_path), SETTINGS)
    before = shown.picture.value
    assert 'role="img" aria-label="write, 1 stream' in before
    shown.slider.value = 1
    assert "write, 8 streams" in shown.picture.value != before
    bundle = shown._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"].startswith('<figure><img alt="write, 8 streams: ')
    assert "currentColor" not in bundle["text/html"]
    assert bundle["text/plain"].startswith("[setting: write, 8 streams")
    shown.slider.value = 0
    assert shown.picture.value == before
