from __future__ import annotations

import pytest

from labkit.bench.load import workers
from labkit.bench.load.arrivals import Bursts, Closed
from labkit.bench.load.client import Target
from labkit.bench.load.workers import processes_for, run, split
from labkit.bench.load.workloads import make_load
from labkit.errors import LabkitError
from tests.unit.bench.load.fake_server import FakeServer, running

TARGET = Target("http://127.0.0.1:9", "plain")


def test_every_request_and_every_client_goes_to_one_process() -> None:
    load = make_load("http64", Closed(7), 20)
    shares = split(TARGET, load, 3)
    assert [share.clients for share in shares] == [3, 2, 2]
    assert sorted(map(id, load.asks)) == sorted(id(ask) for share in shares for ask in share.asks)
    assert [share.clients for share in split(TARGET, make_load("chat"), 2)] == [None, None]


def test_processes_grow_with_the_clients_and_leave_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((16, [1, 1, 2, 8]), (2, [1, 1, 1, 1])):
        monkeypatch.setattr(workers, "usable_cores", lambda cores=cores: cores)
        assert [processes_for(make_load(f"http{n}", requests=2)) for n in (1, 32, 64, 256)] == expected


def test_a_closed_loop_over_processes() -> None:
    load = make_load("chat", Closed(4), 12)
    short = [type(ask)(ask.prompt, ask.text, 5) for ask in load.asks]
    answers: list[None] = []
    with running(FakeServer(per_chunk=2)) as server:
        target = Target(server.url, "plain")
        outcome = run(target, type(load)(load.name, load.arrival, 0, 0.6, short), 2, lambda: answers.append(None))
    assert len(outcome.timings) == len(answers) == len(server.bodies) == 12
    assert {(t.error, t.output_tokens, t.chunks) for t in outcome.timings} == {(None, 5, 3)}
    assert 1 <= server.most_running <= 4, "never more than there are clients"
    assert sorted(map(tuple, (b["prompt"] for b in server.bodies))) == sorted(tuple(a.prompt) for a in load.asks)
    assert len(outcome.gaps) == 12 * 2 and outcome.gaps.min() >= 0
    sent = [t.sent_s for t in outcome.timings]
    assert sent == sorted(sent) and sent[0] >= 0 and all(t.end_s > t.sent_s for t in outcome.timings)
    assert outcome.client.processes == 2 and outcome.client.cpu_share > 0 and outcome.client.late_ms is None


def test_an_open_loop_sends_when_it_is_time_whatever_the_server_does() -> None:
    load = make_load("support", Bursts(100.0, 3), 6)
    with running(FakeServer()) as server:
        outcome = run(Target(server.url, "stuck", timeout_s=2.0), load, 1)
    assert {t.error for t in outcome.timings} == {"timeout"} and server.most_running == 6, "nobody waits for an answer"
    due = [t.due_s for t in outcome.timings]
    assert due == [ask.due_s for ask in load.asks]
    assert all(t.due_s is not None and t.sent_s >= t.due_s for t in outcome.timings)
    assert outcome.client.late_ms is not None and outcome.client.late_ms >= 0


def test_a_process_that_dies_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    load = make_load("chat", Closed(1), 1)
    broken = type(load)("x", load.arrival, 0, 0.6, [None])  # type: ignore[list-item]
    with pytest.raises(LabkitError, match="a process of clients died"):
        run(TARGET, broken, 1)
