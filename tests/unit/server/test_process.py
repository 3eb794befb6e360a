"""What the engine's process keeps of the trace, and when it writes it."""

from types import SimpleNamespace

import pytest

from labkit.config import EngineConfig
from labkit.engine.picture import MOST_EVENTS, MOST_STEPS, last_steps
from labkit.engine.trace import Trace
from labkit.server import process
from labkit.server.messages import Launch

STEPS = 2 * MOST_EVENTS


@pytest.fixture
def trace_of(monkeypatch):
    """trace_of(path) is the trace of an engine that was launched with this path, after STEPS steps."""
    monkeypatch.setattr(process, "EngineCore", lambda model, config, trace, quiet: SimpleNamespace(trace=trace))

    def make(path: str | None) -> Trace:
        trace = process._load(Launch("any", EngineConfig(), path)).trace
        for number in range(STEPS):
            trace.step = number
            trace.emit("step", prefill=[], decode=["a"], ms=1.0, free_blocks=9)
        return trace

    return make


def test_no_more_of_the_trace_stays_in_memory_than_is_looked_at(trace_of):
    trace = trace_of(None)
    assert len(trace.events) == MOST_EVENTS
    assert [step["step"] for step in last_steps(trace)] == list(range(STEPS - MOST_STEPS, STEPS))


def test_the_file_has_every_event(trace_of, tmp_path):
    path = tmp_path / "trace.jsonl"
    trace_of(str(path)).close()
    assert len(path.read_bytes().splitlines()) == STEPS


def test_who_has_the_last_answer_finds_the_trace_written(server, tmp_path):
    path = tmp_path / "trace.jsonl"
    server.core.trace = Trace(path)
    server.core.trace.emit("submit", req="a", prompt=5)
    assert path.read_bytes() == b""
    server.complete(max_tokens=2)
    assert path.read_bytes().count(b"submit") == 1
    server.core.trace.close()
