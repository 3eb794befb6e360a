"""Requests that are far too large in one way or another: each is answered, and soon."""

import concurrent.futures
import json
import time

import httpx
import pytest

from tests.unit.server.test_app import check_error

TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture
def soon():
    """The test ends within some seconds, however slow the machine; a hang takes for ever."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 15


@pytest.mark.usefixtures("soon")
def test_a_prompt_of_ten_megabytes(server):
    check_error(server.complete(prompt="x" * 10_000_000), 413, "invalid_request_error", "body_too_large")
    check_error(server.complete(prompt="x" * 8_000_000), 400, "invalid_request_error", "context_length_exceeded")


@pytest.mark.usefixtures("soon")
def test_ten_thousand_stop_strings(server):
    reply = server.complete(stop=[f"stop number {i}" for i in range(10_000)] + ["ij"], max_tokens=20, n=8)
    assert [choice["text"] for choice in reply.json()["choices"]] == ["fgh"] * 8


@pytest.mark.usefixtures("soon")
def test_a_logit_bias_of_the_whole_vocabulary_and_more(server):
    assert server.complete(logit_bias={str(i): 1 for i in range(257)}, max_tokens=1).status_code == 200
    reply = server.complete(logit_bias={str(i): 1 for i in range(200_000)})
    assert check_error(reply, 400, "invalid_request_error", "invalid_value")["param"] == "logit_bias"


@pytest.mark.parametrize("n", [129, 1000, 10**30])
def test_too_many_choices(server, n):
    assert check_error(server.complete(n=n), 400, "invalid_request_error", "invalid_value")["param"] == "n"


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "body", [b"[" * 1_000_000, b'{"prompt":' * 100_000, b'{"metadata":' + b"[" * 500 + b"]" * 500 + b"}"]
)
def test_deep_json(server, body):
    check_error(
        server.http.post(TEXT, content=body, headers=JSON),
        400,
        "invalid_request_error",
        "invalid_json" if len(body) > 2000 else "invalid_value",
    )


def test_more_answers_than_could_ever_wait(serve):
    """Each prompt and choice counts for the queue."""
    server = serve(engine={"max_num_seqs": 4}, max_queue=6)
    reply = server.complete(prompt=["a", "b"], n=6)
    assert check_error(reply, 400, "invalid_request_error", "invalid_value")["param"] == "prompt"
    assert check_error(server.complete(n=11), 400, "invalid_request_error", "invalid_value")["param"] == "n"
    assert server.complete(prompt=["a", "b"], n=5, max_tokens=1).status_code == 200


def test_the_answers_of_one_request_fill_the_queue(serve):
    server = serve(engine={"max_num_seqs": 4}, max_queue=6)
    server.core.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.complete, prompt=["a", "b"], n=4, max_tokens=1)  # four run, four wait
        while len(server.core.requests) < 2:
            time.sleep(0.01)
        check_error(server.complete(n=3), 503, "overloaded_error", "overloaded")
        second = server.http.build_request("POST", TEXT, json={"prompt": "x", "n": 2, "max_tokens": 1})
        waits = pool.submit(httpx.Client(timeout=20).send, second)
        server.core.gate.set()
        server.process.wake()
        assert first.result(10).status_code == waits.result(10).status_code == 200


@pytest.mark.usefixtures("soon")
def test_a_hundred_thousand_prompts_are_counted_before_they_are_read(server):
    reply = server.http.post(TEXT, content=json.dumps({"prompt": ["x"] * 100_000}), headers=JSON)
    check_error(reply, 400, "invalid_request_error", "invalid_value")
    assert server.core.requests == []
