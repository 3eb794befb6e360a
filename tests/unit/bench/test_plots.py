from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.bench.plots import draw_record, draw_timeline, read_trace, timeline, write_perfetto
from labkit.errors import LabkitError
from tests.unit.bench.samples import a_record, a_trace

PNG = b"\x89PNG\r\n\x1a\n"


def spans(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(round(begin, 6), round(length, 6)) for begin, length in pairs]


def test_events_sorted_by_request() -> None:
    data = timeline(a_trace())
    assert list(data.rows) == ["r0", "r1"]
    r0, r1 = data.rows.values()
    assert spans(r0.waiting) == [(0.0, 0.002)]
    assert spans(r0.prefill) == [(0.002, 0.010)]
    assert spans(r0.decode) == [(0.013, 0.007), (0.021, 0.004)]
    assert r0.marks == [("first_token", 0.0115), ("finish", 0.025)]
    assert spans(r1.waiting) == [(0.001, 0.012), (0.021, 0.006)], "it waits again after a preemption"
    assert spans(r1.prefill) == [(0.013, 0.007), (0.027, 0.003)]
    assert [kind for kind, _ in r1.marks] == ["preempt", "cancel"]
    assert data.free_blocks == [(0.012, 6), (0.02, 5), (0.025, 8), (0.03, 7)]
    assert [(prefill, decode) for _, prefill, decode in data.tokens] == [(20, 0), (5, 1), (0, 1), (6, 0)]


def test_a_client_that_leaves_while_it_waits() -> None:
    events = [{"t": 1.0, "step": 0, "ev": "submit", "req": "a"}, {"t": 3.0, "step": 0, "ev": "cancel", "req": "a"}]
    row = timeline(events).rows["a"]
    assert row.waiting == [(1.0, 2.0)] and row.marks == [("cancel", 3.0)]


@pytest.mark.parametrize("events", [a_trace(), a_trace()[:2]], ids=["whole", "no step yet"])
def test_the_timeline_is_drawn(tmp_path: Path, events: list) -> None:
    path = draw_timeline(events, tmp_path / "t.png")
    assert path.read_bytes().startswith(PNG) and path.stat().st_size > 5000


def test_a_record_is_drawn(tmp_path: Path) -> None:
    path = draw_record(a_record(), tmp_path / "r.png")
    assert path.read_bytes().startswith(PNG) and path.stat().st_size > 5000


def test_perfettos_json(tmp_path: Path) -> None:
    data = json.loads(write_perfetto(a_trace(), tmp_path / "t.perfetto.json").read_text())
    events = data["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "i", "C"}
    for event in events:
        assert event["pid"] == 1 and event["name"]
        if event["ph"] != "M":
            assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0 and event["tid"] in (1, 2)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {1: "r0", 2: "r1"}
    prefill = [(e["ts"], e["dur"]) for e in events if e["name"] == "prefill" and e["tid"] == 1]
    assert prefill == [(2000, 10000)], "microseconds"
    assert [e["args"]["blocks"] for e in events if e["name"] == "free blocks"] == [6, 5, 8, 7]


def test_reading_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [json.dumps(event) for event in a_trace()]
    path.write_text("\n".join(lines) + "\n")
    assert read_trace(path) == a_trace()
    path.write_text("\n".join(lines) + '\n{"t": 0.04, "st')  # the run died while it wrote
    assert read_trace(path) == a_trace()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no event"),
        ("hello\n", "line 1 is no event"),
        ('{"t": 1, "ev": "finish", "req": "a"}\n[]\n{"t": 2, "ev": "finish", "req": "a"}\n', "line 2 is no event"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(LabkitError, match=message):
        read_trace(tmp_path / "t.jsonl")
