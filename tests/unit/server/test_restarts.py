"""An engine that ends by itself: what clients get meanwhile, and how often it is started again."""

import concurrent.futures
import json
import time

import pytest

from labkit.server import engine as engines
from labkit.server import restarts
from labkit.server.engine import unused
from labkit.server.restarts import Restarts
from tests.unit.server.test_app import check_error, eventually

TEXT = "/v1/completions"


@pytest.fixture
def pause(monkeypatch):
    """pause(seconds) is how long the first pause takes from then on."""
    return lambda seconds: monkeypatch.setattr(restarts, "FIRST_PAUSE", seconds)


def health(server):
    return server.http.get("/health").status_code


def test_three_in_ten_minutes_each_after_a_longer_pause():
    counted = Restarts()
    assert [counted.pause(now) for now in (0.0, 10.0, 20.0)] == [1.0, 4.0, 16.0]
    assert counted.pause(599.0) is None
    assert counted.pause(601.0) == 16.0, "the first is forgotten, two count"
    assert counted.pause(5000.0) == 1.0


def test_what_was_open_and_what_comes_meanwhile(server, pause):
    pause(60)
    server.core.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        lost = pool.submit(server.complete, n=2)
        assert eventually(lambda: len(server.core.requests) == 1)
        server.process.die()
        check_error(lost.result(5), 500, "server_error", "internal_error")
    reply = server.complete()
    check_error(reply, 503, "overloaded_error", "overloaded")
    assert int(reply.headers["retry-after"]) >= 1
    assert health(server) == server.http.get("/ready").status_code == 503
    metrics = server.http.get("/metrics").text
    assert 'labkit_requests_total{finish_reason="abort"} 1.0' in metrics
    assert "labkit_num_requests_running 0.0" in metrics


def test_a_stream_that_loses_its_engine(server, pause):
    pause(60)
    with server.http.stream("POST", TEXT, json={"prompt": "a", "max_tokens": 60, "stream": True}) as reply:
        parts = reply.iter_text()
        text = next(parts)
        server.core.gate.clear()
        server.process.die()
        text += "".join(parts)
    assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "internal_error"


def test_it_comes_back_and_counts_on(server, pause):
    pause(0.01)
    first = server.complete(max_tokens=5).json()["choices"][0]["text"]
    server.process.die()
    assert eventually(lambda: server.process.spawned == 2 and health(server) == 200)
    assert server.http.get("/ready").status_code == 200
    assert server.complete(max_tokens=5).json()["choices"][0]["text"] == first
    assert "labkit_generation_tokens_total 10.0" in server.http.get("/metrics").text


def test_the_fourth_end_is_the_last(server, pause):
    pause(0.001)
    for number in (2, 3, 4):
        server.process.die()
        assert eventually(lambda n=number: server.process.spawned == n and health(server) == 200)
    server.process.die()
    assert eventually(lambda: health(server) == 503)
    assert eventually(lambda: server.complete().status_code == 500)
    check_error(server.complete(), 500, "server_error", "internal_error")
    time.sleep(0.1)
    assert server.process.spawned == 4


def test_the_server_ends_while_the_engine_is_away(serve, pause):
    pause(60)
    server = serve()
    server.process.die()
    assert eventually(lambda: health(server) == 503)
    begin = time.monotonic()
    server.handle.stop()
    assert time.monotonic() - begin < 5


def test_an_engine_that_is_silent(server, monkeypatch):
    monkeypatch.setattr(engines, "SECONDS_OF_SILENCE", 0.2)
    time.sleep(0.3)
    assert health(server) == 200, "it has nothing to do"
    server.core.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.complete, max_tokens=1)
        assert eventually(lambda: health(server) == 503)
        server.core.gate.set()
        server.process.wake()
        assert waiting.result(5).status_code == 200
    assert health(server) == 200


def test_each_engine_has_a_trace_of_its_own(tmp_path):
    assert unused(None) is None
    trace = tmp_path / "trace.jsonl"
    trace.touch()
    (tmp_path / "trace.1.jsonl").touch()
    assert unused(str(trace)) == str(tmp_path / "trace.2.jsonl")
