"""Event streams, and clients that go away in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from labkit.server.errors import ApiError, internal

log = logging.getLogger("labkit.server")
encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes. Raises ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


class EventStream(Response):
    """Sends events as they are made. An error after the beginning becomes an event, then the stream ends.

    Args:
        events: each item goes out as it is.
        deadline: time of the event loop at which the stream ends with the error `late`.

    Attributes:
        at_end: what is closed when the stream ends, however it ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], deadline: float | None = None, late: ApiError | None = None):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._deadline = deadline
        self._late = late
        self.at_end = contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.at_end:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        error: ApiError | None = None
        try:
            async with asyncio.timeout_at(self._deadline):
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as failure:
            error = failure
        except TimeoutError:
            error = self._late or internal()
        except Exception:
            log.exception("a stream failed")
            error = internal()
        end = event(error.body()) if error is not None else b""
        await send({"type": "http.response.body", "body": end, "more_body": False})
