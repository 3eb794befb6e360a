"""`labkit serve toy` as a program of its own: the official openai client against it, and how it begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

KEY = "a-key-of-these-tests"
ASK = [{"role": "user", "content": "Name a colour."}]


class Served:
    """`labkit serve toy` with these options, on a free port."""

    def __init__(self, folder: Path, *options: str, **env: str):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "log"
        command = [
            sys.executable,
            "-m",
            "labkit",
            "serve",
            "toy",
            "--device",
            "cpu",
            "--port",
            str(self.port),
            *options,
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "LABKIT_API_KEY": KEY, **env}
            )
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)

    def output(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/ready").status_code == 200:
                    return
            assert self.process.poll() is None and time.monotonic() < end, self.output()
            time.sleep(0.1)

    def engine_process(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"labkit_{name} ")).split()[1])

    def running(self) -> float:
        return self.metric("num_requests_running")


def wait_for(what: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Served]:
    served = Served(folder, *options)
    try:
        served.wait_ready()
        yield served
    finally:
        served.process.kill()
        served.process.wait()
        served.http.close()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("server")) as served:
        yield served


def test_chat(toy):
    reply = toy.client().chat.completions.create(model="toy", messages=ASK, max_tokens=8, logprobs=True, top_logprobs=2)
    assert reply.object == "chat.completion" and reply.model == "toy"
    assert reply.choices[0].message.role == "assistant" and reply.choices[0].finish_reason in ("stop", "length")
    assert len(reply.choices[0].logprobs.content) == reply.usage.completion_tokens <= 8


def test_chat_stream(toy):
    fields = {"model": "toy", "messages": ASK, "max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 2}
    chunks = list(toy.client().chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    whole = toy.client().chat.completions.create(**fields)
    assert chunks[0].choices[0].delta.role == "assistant"
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [whole.choices[index].finish_reason]
    assert chunks[-1].usage == whole.usage


def test_completions(toy):
    fields = {"model": "toy", "prompt": ["One two three", "Four"], "max_tokens": 9, "temperature": 0}
    reply = toy.client().completions.create(
        **fields, logprobs=1, echo=True, extra_body={"ignore_eos": True, "top_k": 5}
    )
    assert [choice.text.startswith(prompt) for choice, prompt in zip(reply.choices, fields["prompt"])] == [True, True]
    assert reply.usage.completion_tokens == 18
    pieces = ["", ""]
    for chunk in toy.client().completions.create(**fields, stream=True, echo=True, extra_body={"ignore_eos": True}):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == [choice.text for choice in reply.choices]


def test_models(toy):
    assert [model.id for model in toy.client().models.list().data] == ["toy"]
    assert toy.client().models.retrieve("toy").object == "model"


def test_errors_are_the_clients_own_classes(toy):
    chat = toy.client().chat.completions
    with pytest.raises(openai.BadRequestError) as error:
        chat.create(model="toy", messages=ASK, temperature=-3)
    assert (error.value.code, error.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError):
        chat.create(model="another", messages=ASK)
    with pytest.raises(openai.AuthenticationError):
        toy.client("wrong").models.list()


def test_a_stream_that_the_client_closes_is_cancelled(toy):
    stream = toy.client().completions.create(
        model="toy", prompt="On it goes", stream=True, max_tokens=400, n=8, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert toy.running() > 0
    stream.close()
    end = time.monotonic() + 10
    while toy.running() and time.monotonic() < end:
        time.sleep(0.02)
    assert toy.running() == 0
    assert 'labkit_requests_total{finish_reason="abort"} 1.0' in toy.http.get("/metrics").text


def test_the_async_client(toy):
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{toy.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
            fields = {"model": "toy", "messages": ASK, "max_tokens": 8, "temperature": 0}
            whole = await client.chat.completions.create(**fields)
            pieces = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**fields, stream=True)
            ]
        return whole.choices[0].message.content, "".join(pieces)

    whole, joined = asyncio.run(ask())
    assert joined == whole


def test_raw_response_headers(toy):
    reply = toy.client().completions.with_raw_response.create(
        model="toy", prompt="Hello", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert reply.headers["x-request-id"] == "mine" and reply.request_id == "mine"
    assert reply.parse().usage.completion_tokens == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(toy):
    """As the README says it: -N shows the events as they come."""
    body = json.dumps({"model": "toy", "messages": ASK, "max_tokens": 4, "stream": True})
    command = ["curl", "-sSN", f"{toy.url}/v1/chat/completions", "-H", f"Authorization: Bearer {KEY}"]
    done = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", body], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.endswith("data: [DONE]\n\n"), done.stderr


def test_a_port_in_use(toy, tmp_path):
    second = Served(tmp_path, "--port", str(toy.port))
    assert second.process.wait(60) == 1
    assert second.output().startswith("labkit: error: ") and second.output().count("\n") == 1
    assert str(toy.port) in second.output()


def test_a_model_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "labkit", "serve", str(tmp_path / "nothing"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("labkit: error: ") and "Traceback" not in done.stderr


def test_production_needs_a_key_of_ones_own(tmp_path):
    served = Served(tmp_path, LABKIT_API_KEY="", LABKIT_ENVIRONMENT="production")
    assert served.process.wait(60) == 1
    assert served.output().startswith("labkit: error: ") and served.output().count("\n") == 1


def test_sigterm_with_idle_connections_and_the_trace(tmp_path):
    """A page that watches and an idle connection do not hold up the end; the trace is complete."""
    trace = tmp_path / "trace.jsonl"
    with serving(tmp_path, "--trace", str(trace)) as served:
        served.client().completions.create(model="toy", prompt="Hello", max_tokens=3)
        with served.http.stream("GET", "/dashboard/events") as page:
            next(page.iter_raw())
            begin = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(20) == 0
        assert time.monotonic() - begin < 10, "well before --drain-seconds"
        assert "Traceback" not in served.output()
    kinds = [json.loads(line)["ev"] for line in trace.read_text().splitlines()]
    assert kinds[0] == "submit" and {"admit", "step", "first_token", "finish"} <= set(kinds)


def test_a_log_for_programs(tmp_path):
    """From the first line to the last each is an object, and a request's lines have its id."""
    with serving(tmp_path, "--log-format", "json") as served:
        served.http.get("/v1/models", headers={"x-request-id": "mine"})
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        entries = [json.loads(line) for line in served.output().splitlines()]
    assert any(served.url in entry["message"] for entry in entries), "where it listens"
    assert [entry["path"] for entry in entries if entry["request_id"] == "mine"] == ["/v1/models"]


def test_ctrl_c_in_the_middle_of_a_stream(tmp_path):
    with serving(tmp_path) as served:
        engine = served.engine_process()
        stream = served.client().completions.create(
            model="toy", prompt="On it goes", stream=True, max_tokens=400, n=64, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        served.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert served.process.wait(20) == 130
        assert "Traceback" not in served.output()
        assert not engine.is_running()


def test_the_engine_process_is_killed_and_started_again(tmp_path):
    """Open requests fail, none hangs; health says so meanwhile; afterwards the same request has the same answer."""
    ask = {"model": "toy", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    with serving(tmp_path, "--trace", str(tmp_path / "trace.jsonl")) as served:
        before = served.client().completions.create(**ask).choices[0].text
        stream = served.client().completions.create(
            model="toy", prompt="On it goes", stream=True, max_tokens=400, n=8, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        engine = served.engine_process()
        engine.kill()
        with pytest.raises(openai.APIError, match="this request is lost"):
            list(stream)
        wait_for(lambda: served.http.get("/health").status_code == 503)
        with pytest.raises(openai.InternalServerError) as error:
            served.client().completions.create(**ask)
        assert error.value.status_code == 503 and int(error.value.response.headers["retry-after"]) >= 1
        wait_for(lambda: served.http.get("/health").status_code == 200, 100)
        assert served.engine_process().pid != engine.pid
        assert served.client().completions.create(**ask).choices[0].text == before
        assert served.running() == 0
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        assert "started again" in served.output() and "Traceback" not in served.output()
    assert (tmp_path / "trace.1.jsonl").read_text().count('"ev":"submit"') == 1


@pytest.mark.parametrize("busy", [False, True])
def test_the_engine_process_does_not_outlive_the_server(tmp_path, busy):
    with serving(tmp_path) as served:
        engine = served.engine_process()
        if busy:  # what it says to nobody must not keep it
            ask = {
                "model": "toy",
                "prompt": "a",
                "max_tokens": 1500,
                "stream": True,
                "extra_body": {"ignore_eos": True},
            }
            next(iter(served.client().completions.create(**ask)))
        served.process.kill()
        engine.wait(20)
        assert not engine.is_running()
