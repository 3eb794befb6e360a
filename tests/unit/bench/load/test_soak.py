from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from labkit.bench.load import soak as soak_module
from labkit.bench.load.client import Target, open_session
from labkit.bench.load.leaks import Watch, gauges_of, judge, memory_is_flat
from labkit.bench.load.record import SoakRecord
from labkit.bench.load.soak import Crowd, Question, SoakSettings, bodies, run_soak
from tests.unit.bench.load.fake_server import QUEUE, FakeServer, running
from tests.unit.bench.load.samples import a_sample

IDLE = {"labkit_num_requests_running": 0.0, "labkit_kv_cache_usage_ratio": 0.0}


def a_watch(after: Any = None, samples: Any = None, before: Any = None) -> Any:
    flat = [a_sample(float(t), 100 + 0.1 * (t % 2)) for t in range(40)]
    rest = a_sample(0.0, **IDLE)
    return SimpleNamespace(before=before or rest, after=after or rest, samples=samples or flat)


def failed(watch: Any) -> list[str]:
    return [check.name for check in judge(watch) if not check.passed]


def test_a_server_at_rest_as_before_has_no_leak() -> None:
    checks = judge(a_watch())
    assert len(checks) == 6 and all(check.passed for check in checks)


@pytest.mark.parametrize(
    ("watch", "name"),
    [
        (a_watch(after=a_sample(9.0, **{**IDLE, "labkit_kv_cache_usage_ratio": 0.01})), "no block"),
        (a_watch(after=a_sample(9.0, **{**IDLE, "labkit_num_requests_running": 1})), "no block"),
        (a_watch(after=a_sample(9.0)), "no block"),
        (a_watch(after=a_sample(9.0, tasks=7, **IDLE)), "tasks"),
        (a_watch(after=a_sample(9.0, fds=21, **IDLE)), "file descriptors"),
        (a_watch(samples=[a_sample(float(t), 100 + t) for t in range(40)]), "memory"),
        (a_watch(samples=[a_sample(float(t), threads=9 + t // 10) for t in range(40)]), "threads"),
        (a_watch(after=msgspec.structs.replace(a_sample(9.0, **IDLE), processes=1)), "no process"),
    ],
)
def test_each_leak_is_found(watch: Any, name: str) -> None:
    assert [check.startswith(name) for check in failed(watch)] == [True]


def test_what_grows_in_the_warm_up_is_no_leak() -> None:
    grown = [a_sample(float(t), min(100 + 20 * t, 300), threads=min(9 + t, 15)) for t in range(40)]
    assert failed(a_watch(samples=grown)) == []


def test_memory_may_wobble() -> None:
    wobble = memory_is_flat([a_sample(float(t), 1000 + (25 if t % 3 else 0)) for t in range(40)])
    assert wobble.passed and "allowed" in wobble.found


def test_of_a_server_that_was_not_started_here_only_the_gauges_are_judged() -> None:
    far = msgspec.structs.replace(a_sample(0.0, tasks=0, **IDLE), processes=0)
    assert [check.name for check in judge(a_watch(before=far, after=far))] == ["no block and no request is left"]


def test_gauges() -> None:
    assert gauges_of(QUEUE.format(3, 2)) == {"labkit_num_requests_running": 2.0}


def test_tasks_are_no_gauge_that_is_zero_at_rest() -> None:
    metrics = "# TYPE labkit_asyncio_tasks gauge\nlabkit_asyncio_tasks 7.0\n"
    look = Watch(SimpleNamespace(metrics=lambda: metrics)).look()  # type: ignore[arg-type]
    assert (look.tasks, look.gauges) == (7, {})


def test_requests_are_seeded() -> None:
    assert bodies("m", 1) == bodies("m", 1) != bodies("m", 2)
    assert all("seed" in body and body["max_tokens"] >= 1 for body in bodies("m", 1))


def soak(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> SoakRecord:
    monkeypatch.setattr(soak_module, "QUESTIONS", 3)
    with running(server):
        return run_soak(SoakSettings("plain", server.url, clients=6, seconds=2.5), lambda _: None)


def test_clients_of_every_kind_and_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    record = soak(server, monkeypatch)
    assert record.wrong == [] and all(check.passed for check in record.checks)
    kinds = {outcome.partition(":")[0] for outcome in record.outcomes}
    assert kinds == {"read", "leave", "dawdle", "nonsense"}
    assert server.dropped > 0, "some really went away"
    assert len(record.samples) >= 2


@pytest.mark.parametrize("habit", ["read", "leave", "dawdle"])
@pytest.mark.parametrize(("alone", "right"), [("0 " * 30, True), ("0 1 " * 15, False)])
def test_each_kind_of_client_compares_what_it_got(habit: str, alone: str, right: bool) -> None:
    body = {"model": "plain", "prompt": [5], "max_tokens": 30, "temperature": 0.0}

    async def run(url: str) -> list[str]:
        target = Target(url, "plain")
        async with open_session(target) as session:
            crowd = Crowd(session, target, [])
            await getattr(crowd, habit)(Question(body, alone), Random(0))  # this seed leaves after 13 chunks
        return crowd.wrong

    with running(FakeServer()) as server:
        wrong = asyncio.run(run(server.url))
    assert (wrong == []) is right


def test_rest_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = {**IDLE, "labkit_num_requests_running": 1.0}
    looks = [a_sample(0.0, **busy), a_sample(1.0, **IDLE)]  # before
    looks += [a_sample(2.0, **busy), a_sample(2.5, fds=24, **IDLE), a_sample(3.0, tasks=8, **IDLE)]  # after
    looks += [a_sample(4.0, **IDLE)]
    watch = Watch(SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(watch, "look", lambda: looks.pop(0))
    asyncio.run(watch.idle(10.0))
    asyncio.run(watch.idle(10.0))
    assert watch.before is not None and watch.after is not None
    assert (watch.before.t_s, watch.after.t_s, looks) == (1.0, 4.0, [])


def test_an_answer_that_depends_on_who_else_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = soak(FakeServer(vary=True), monkeypatch)
    assert record.wrong and "alone" in record.wrong[0] and not record.checks[0].passed


def test_nonsense_that_is_answered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "NONSENSE", ({"user": "me"},))
    record = soak(FakeServer(), monkeypatch)
    assert record.wrong and all(what.startswith("nonsense") for what in record.wrong)
