"""A whole server on a port of its own, with the fake engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from labkit.config import EngineConfig
from labkit.server import service
from labkit.server.child import Child
from labkit.server.config import ServerConfig
from labkit.server.serve import ServerHandle, start
from tests.unit.server.fake_engine import FakeCore, FakeProcess, byte_tokenizer

KEY = "a-key-of-these-tests"


class Running:
    """The server under test, a client with its key, and the engine's inside."""

    def __init__(self, handle: ServerHandle, process: FakeProcess):
        self.handle = handle
        self.process = process
        self.http = httpx.Client(base_url=handle.url, headers={"authorization": f"Bearer {KEY}"}, timeout=20)

    @property
    def core(self) -> FakeCore:
        return self.process.core

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "hello", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields})


Start = Callable[..., Running]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers with the ServerConfig fields given; `engine` holds EngineConfig's."""
    running: list[Running] = []

    def begin(engine: dict[str, Any] | None = None, **fields: Any) -> Running:
        process = FakeProcess()

        async def spawn(child: Child) -> None:
            await process.spawn(child)

        checkpoint = SimpleNamespace(name="fake", path="/fake", tokenizer=byte_tokenizer())
        monkeypatch.setattr(Child, "spawn", spawn)
        monkeypatch.setattr(service, "open_checkpoint", lambda model: checkpoint)
        config = ServerConfig(**{"port": 0, "api_keys": (KEY,), **fields})
        running.append(Running(start("fake", EngineConfig(**engine or {}), config), process))
        return running[-1]

    yield begin
    for one in running:
        one.http.close()
        one.handle.stop()


@pytest.fixture
def server(serve: Start) -> Running:
    return serve()
