"""Clients that go away, at every stage of their request: its blocks come back at once, and nobody else notices."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.integration.test_openai_client import KEY, Served, serving, wait_for

# Four tokens a step, so that the prompt below takes a hundred steps; two places, so that a third request waits.
OPTIONS = ("--max-num-batched-tokens", "4", "--max-num-seqs", "2", "--max-model-len", "1024")
ANSWER = 600
LONG_PROMPT = [5 + i % 50 for i in range(400)]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("cancel"), *OPTIONS) as served:
        yield served


class Client:
    """Sends a request and does not wait for the answer; `with` closes the connection."""

    def __init__(self, served: Served, prompt: str | list[int], stream: bool, n: int = 1):
        body = json.dumps(
            {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "stream": stream, "n": n, "temperature": 0}
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        self.socket = socket.create_connection(("127.0.0.1", served.port), timeout=30)
        self.socket.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )

    def __enter__(self) -> socket.socket:
        return self.socket

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def is_idle(served: Served) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
    return [served.metric(name) for name in names] == [0, 0, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_queued(slow: Served, stream: bool):
    with Client(slow, "These two run", True, n=2) as others:
        wait_for(lambda: slow.running() == 2)
        with Client(slow, LONG_PROMPT, stream):
            wait_for(lambda: slow.metric("num_requests_waiting") == 1)
        wait_for(lambda: slow.metric("num_requests_waiting") == 0)
        assert slow.running() == 2, "the others go on"
        assert others.recv(100)
    wait_for(lambda: is_idle(slow))


@pytest.mark.parametrize("stream", [False, True])
def test_prefilling(slow: Served, stream: bool):
    firsts = slow.metric("time_to_first_token_seconds_count")
    with Client(slow, LONG_PROMPT, stream):
        wait_for(lambda: slow.running() == 1)
        assert slow.metric("kv_cache_usage_ratio") > 0
    wait_for(lambda: is_idle(slow))
    assert slow.metric("time_to_first_token_seconds_count") == firsts, "it was still at its prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_decoding(slow: Served, stream: bool):
    begin = slow.metric("generation_tokens_total")
    with Client(slow, "Short", stream, n=2):
        wait_for(lambda: slow.metric("generation_tokens_total") > begin)
    wait_for(lambda: is_idle(slow))
    drawn = slow.metric("generation_tokens_total")
    assert drawn < begin + 2 * ANSWER, "it was not at its end"
    time.sleep(0.2)
    assert slow.metric("generation_tokens_total") == drawn


def test_what_was_cancelled_is_counted_once_as_abort(slow: Served):
    with Client(slow, "Short", True, n=2) as client:
        client.recv(100)
        before = slow.http.get("/metrics").text.partition('finish_reason="abort"} ')[2].split()[0]
    wait_for(lambda: is_idle(slow))
    after = slow.http.get("/metrics").text.partition('finish_reason="abort"} ')[2].split()[0]
    assert float(after) == float(before) + 1
