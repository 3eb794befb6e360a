"""What a token costs the HTTP process: processor time, with an engine that computes nothing.

    python scripts/front_end_cost.py [STREAMS] [TOKENS] [MILLISECONDS]

STREAMS clients stream a chat of TOKENS tokens each; the engine gives every one of them a token every MILLISECONDS,
slowly enough that no two tokens share a write. The server runs in a process of its own, so that its processor time is
nobody else's. Prints microseconds a token, and how long a write took, which is the system's.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KEY = "a-key-to-measure-with"


def engine(address: str, milliseconds: float) -> None:
    """An engine process: FakeCore of the tests, one step every so many milliseconds."""
    import zmq

    from labkit.config import EngineConfig
    from labkit.engine.limits import RequestLimits
    from labkit.server.messages import Launch, decode_to_engine
    from labkit.server.process import EngineLoop
    from tests.unit.server.fake_engine import FakeCore

    class Slow(FakeCore):
        def __init__(self, config: EngineConfig):
            super().__init__(config)
            self.limits = RequestLimits(max_model_len=100_000, vocab_size=257, kv_tokens=10**9)
            self.next = time.monotonic()

        def step(self):  # type: ignore[no-untyped-def]
            self.next = max(time.monotonic(), self.next + milliseconds / 1e3)
            time.sleep(max(0, self.next - time.monotonic()))
            return super().step()

    with zmq.Context() as context, context.socket(zmq.PAIR) as connection:
        connection.set_hwm(0)
        connection.connect(address)
        launch = decode_to_engine(connection.recv())
        assert isinstance(launch, Launch)
        EngineLoop(Slow(launch.config), connection, lifeline=sys.stdin.fileno(), received=1).run()  # type: ignore[arg-type]


def serve(port: int, milliseconds: float) -> None:
    """The server, with that engine behind it."""
    from types import SimpleNamespace

    from labkit.config import EngineConfig
    from labkit.server import child, service
    from labkit.server.config import ServerConfig
    from labkit.server.serve import run
    from tests.unit.server.fake_engine import byte_tokenizer

    here, launch = str(Path(__file__).resolve()), asyncio.create_subprocess_exec

    async def fake(program: str, _m: str, _module: str, address: str, **options):  # type: ignore[no-untyped-def]
        return await launch(program, here, "engine", address, str(milliseconds), **options)

    child.asyncio.create_subprocess_exec = fake  # type: ignore[attr-defined]
    service.open_checkpoint = lambda _: SimpleNamespace(name="fake", path="/fake", tokenizer=byte_tokenizer())  # type: ignore[assignment,misc,return-value]
    write = asyncio.selector_events._SelectorSocketTransport.write  # type: ignore[attr-defined]
    spent = [0.0, 0]

    def timed(transport, data):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        write(transport, data)
        spent[0] += time.perf_counter() - begin
        spent[1] += 1

    asyncio.selector_events._SelectorSocketTransport.write = timed  # type: ignore[attr-defined]
    run("fake", EngineConfig(max_num_seqs=4096), ServerConfig(port=port, api_keys=(KEY,), log_level="warning"))
    print(f"a write to a socket took {1e6 * spent[0] / spent[1]:.1f} µs, the system's part of the above", flush=True)


async def read(port: int, tokens: int) -> int:
    """One client; returns how many pieces of content came."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    data = await reader.read()
    writer.close()
    assert b"[DONE]" in data, data[:300]
    return data.count(b'"content":"') - 1


async def measure(streams: int, tokens: int, milliseconds: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, __file__, "serve", str(port), str(milliseconds)], env=os.environ)
    try:
        while True:
            try:
                await read(port, 1)
                break
            except (OSError, AssertionError):
                await asyncio.sleep(0.2)
        process = psutil.Process(server.pid)
        before, begin = process.cpu_times(), time.monotonic()
        pieces = await asyncio.gather(*(read(port, tokens) for _ in range(streams)))
        after, seconds = process.cpu_times(), time.monotonic() - begin
        user, system = after.user - before.user, after.system - before.system
        total = streams * tokens
        print(
            f"{streams} streams × {tokens} tokens in {seconds:.1f} s, {sum(pieces) / total:.2f} pieces a token: "
            f"{1e6 * (user + system) / total:.1f} µs a token ({1e6 * user / total:.1f} in Python, "
            f"{1e6 * system / total:.1f} in the kernel)"
        )
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    role, *rest = sys.argv[1:] or [""]
    if role == "engine":
        engine(rest[0], float(rest[1]))
    elif role == "serve":
        serve(int(rest[0]), float(rest[1]))
    else:
        numbers = [float(text) for text in sys.argv[1:]]
        streams, tokens, milliseconds = numbers + [64, 200, 50][len(numbers) :]
        asyncio.run(measure(int(streams), int(tokens), milliseconds))
