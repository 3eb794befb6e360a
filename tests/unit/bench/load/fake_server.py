"""An OpenAI-style server with no model, whose timing is known, and which misbehaves as the model's name says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

FIRST_SECONDS, GAP_SECONDS = 0.03, 0.005
QUEUE = """# TYPE labkit_request_queue_seconds histogram
labkit_request_queue_seconds_bucket{{le="0.1"}} {0}
labkit_request_queue_seconds_bucket{{le="0.2"}} {0}
labkit_request_queue_seconds_bucket{{le="+Inf"}} {0}
labkit_request_queue_seconds_count {0}
labkit_request_queue_seconds_sum {0}
# TYPE labkit_num_requests_running gauge
labkit_num_requests_running {1}
"""


class FakeServer:
    """Sends `per_chunk` tokens a chunk.

    Attributes:
        bodies: what was asked.
        running, most_running: requests now, and most at once.
        dropped: streams whose client went away.
        vary: the text of an answer depends on how many run.
    """

    def __init__(self, per_chunk: int = 1, vary: bool = False):
        self.per_chunk, self.vary = per_chunk, vary
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = self.dropped = 0
        self.url = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] == "busy" or unfit(body):
            return web.json_response({"error": {"message": "no"}}, status=503 if body["model"] == "busy" else 400)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if not body.get("stream"):
                await asyncio.sleep(FIRST_SECONDS)
                return web.json_response({"choices": [{"text": self.word(body) * body["max_tokens"]}]})
            return await self.stream(request, body)
        except ConnectionResetError:
            self.dropped += 1
            raise
        finally:
            self.running -= 1

    def word(self, body: dict[str, Any]) -> str:
        return f"{body.get('seed', 0)}{self.running if self.vary else ''} "

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: Any) -> None:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())

        model, left = body["model"], body["max_tokens"] - (body["model"] == "short")
        asked = left
        if "messages" in body:
            await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(FIRST_SECONDS)
        while left > 0:
            count = min(self.per_chunk, left)
            await send({"choices": [self.choice(body, count)], "usage": None})
            left -= count
            if model in ("error", "cut", "garbage"):
                break
            await asyncio.sleep(GAP_SECONDS if model != "stuck" else 60)
        if model == "error":
            await send({"error": {"message": "too slow"}})
        if model == "garbage":
            await send("{")
        if model == "cut":
            return response
        if model != "no-usage" and body.get("stream_options"):
            await send({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": asked}})
        await send("[DONE]")
        return response

    def choice(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        text = self.word(body) * count
        chat = "messages" in body
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
        if body.get("logprobs") is not None:
            entry = {"content": [{"token": "x"}] * count} if chat else {"tokens": ["x"] * count}
            choice["logprobs"] = entry
        return choice

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=QUEUE.format(len(self.bodies), self.running))

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.completions),
                web.get("/metrics", self.metrics),
            ]
        )
        return app


def unfit(body: dict[str, Any]) -> bool:
    """As the soak's nonsense is."""
    prompt_is_wrong = "prompt" in body and (not body["prompt"] or -1 in body["prompt"])
    return (
        prompt_is_wrong
        or not 0 < body["max_tokens"] < 10**6
        or isinstance(body["temperature"], str)
        or body["model"] == "nobody's"
        or "unheard_of" in body
        or body.get("stop") == [""]
    )


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """In a thread with a loop of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
