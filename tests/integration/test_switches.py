"""Each switch of the dashboard on a running server, and what the trace says of it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from labkit.config import EngineConfig
from labkit.server.config import ServerConfig
from labkit.server.serve import ServerHandle, start

KEY = "a-key-of-these-tests"
LONG = "The clock by the sea told of ships and storms, and of a town where nobody knew the hour. " * 4


class Served:
    """A server with the toy, and its trace once it has ended."""

    def __init__(self, folder: Path, **engine: Any):
        self.path = folder / "trace.jsonl"
        config = EngineConfig(**{"device": "cpu", "num_kv_blocks": 400, "max_num_batched_tokens": 256, **engine})
        self.handle: ServerHandle = start("toy", config, ServerConfig(port=0, api_keys=(KEY,), trace=str(self.path)))
        self.http = httpx.Client(
            base_url=self.handle.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False
        )
        self.threads: list[threading.Thread] = []

    def ask(self, prompt: str = "Hello", max_tokens: int = 2, **fields: Any) -> None:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        assert self.http.post("/v1/completions", json=body).status_code == 200

    def ask_later(self, **fields: Any) -> None:
        """In a thread; comes back when the engine knows of it."""
        before = self.numbers()
        self.threads.append(threading.Thread(target=self.ask, kwargs=fields))
        self.threads[-1].start()
        while self.numbers() == before:
            time.sleep(0.002)

    def numbers(self) -> tuple[str, ...]:
        lines = self.http.get("/metrics").text.splitlines()
        return tuple(line for line in lines if line.startswith("labkit_num_requests_"))

    def switch(self, **settings: Any) -> None:
        reply = self.http.post("/dashboard/settings", json=settings)
        assert reply.status_code == 200 and settings.items() <= reply.json()["settings"].items()

    def trace(self) -> list[dict[str, Any]]:
        for thread in self.threads:
            thread.join()
        self.stop()
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def stop(self) -> None:
        self.http.close()
        self.handle.stop()


@pytest.fixture
def serve(tmp_path):
    served: list[Served] = []

    def begin(**engine: Any) -> Served:
        served.append(Served(tmp_path, **engine))
        return served[-1]

    yield begin
    for one in served:
        one.stop()


def split(trace: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events between one change and the next."""
    parts: list[list[dict[str, Any]]] = [[]]
    for event in trace:
        if event["ev"] == "setting":
            parts.append([])
        else:
            parts[-1].append(event)
    return parts


def changes(trace: list[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    return [(e["name"], e["was"], e["value"]) for e in trace if e["ev"] == "setting"]


def test_policy(serve):
    server = serve(max_num_seqs=1)
    server.ask_later(max_tokens=500)
    for priority in (3, 1, 2):
        server.ask_later(priority=priority)
    server.switch(policy="priority")
    trace = server.trace()
    assert changes(trace) == [("policy", "fcfs", "priority")]
    before, after = split(trace)
    assert [e["req"] for e in before if e["ev"] == "admit"] == ["r1"]
    assert [e["req"] for e in after if e["ev"] == "admit"] == ["r3", "r4", "r2"]


def test_prefix_caching(serve):
    server = serve()
    server.ask(LONG)
    server.ask(LONG)
    server.switch(enable_prefix_caching=False)
    server.ask(LONG)
    server.switch(enable_prefix_caching=True)
    server.ask(LONG)
    trace = server.trace()
    assert changes(trace) == [("enable_prefix_caching", True, False), ("enable_prefix_caching", False, True)]
    hits = [[e["req"] for e in part if e["ev"] == "hit"] for part in split(trace)]
    assert hits == [["r2"], [], ["r4"]]


def test_chunk_size(serve):
    server = serve(enable_prefix_caching=False)
    server.ask(LONG)
    server.switch(max_num_batched_tokens=16)
    server.ask(LONG)
    trace = server.trace()
    assert changes(trace) == [("max_num_batched_tokens", 256, 16)]
    before, after = (
        [sum(length for _, _, length in e["prefill"]) for e in part if e["ev"] == "step" and e["prefill"]]
        for part in split(trace)
    )
    assert before == [sum(after)] and before[0] > 32, "in one piece"
    assert max(after) == 16 and len(after) == -(-sum(after) // 16)
    from_step = next(e["step"] for e in trace if e["ev"] == "setting")
    assert all(e["step"] >= from_step for e in split(trace)[1] if e["ev"] == "step")


def test_max_batch(serve):
    server = serve(max_num_seqs=4)
    for _ in range(3):
        server.ask_later(max_tokens=300)
    server.switch(max_num_seqs=1)
    server.ask_later(max_tokens=5)
    trace = server.trace()
    assert changes(trace) == [("max_num_seqs", 4, 1)]
    before, after = ([len(e["decode"]) + len(e["prefill"]) for e in p if e["ev"] == "step"] for p in split(trace))
    assert max(before) == 3
    assert after == sorted(after, reverse=True) and after[-1] == 1, "nobody joins before there is a seat"
    assert [e["req"] for e in split(trace)[1] if e["ev"] == "admit"] == ["r4"]
    assert [e for e in trace if e["ev"] == "preempt"] == []


def test_a_switch_that_changes_nothing_leaves_no_mark(serve):
    server = serve()
    server.switch(policy="fcfs", max_num_batched_tokens=256)
    assert changes(server.trace()) == []
