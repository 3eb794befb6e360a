"""Event streams, and clients that go away in the middle, or read too slowly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from labkit.server.connection import unsent_of
from labkit.server.errors import ApiError, internal, too_slow

log = logging.getLogger("labkit.server")
encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
DIRECT_SEND = "labkit.send"  # in the scope: uvicorn's own `send`, without the layers that look at every message
MOST_UNSENT = 1 << 20  # bytes that a stream may keep for its reader, beside what the system keeps
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


class Outlet:
    """Where a stream is written to. A write never waits for the client.

    Its beginning goes through all layers of the server; they have nothing to say about what follows, which comes by the
    thousand.
    """

    def __init__(self, scope: Scope, send: Send):
        self._send = send
        self._send_body = scope[DIRECT_SEND]
        self._unsent = unsent_of(scope)
        self._open = True

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes, last: bool = False) -> None:
        """Raises ApiError when the client has left too much unread."""
        unsent = self._unsent()
        if unsent > MOST_UNSENT:
            raise too_slow(unsent)
        self._open = not last
        await self._send_body({"type": "http.response.body", "body": data, "more_body": not last})

    async def end(self, data: bytes = b"") -> None:
        """The last write, if there was none yet; however much is unread."""
        if self._open:
            self._open = False
            await self._send_body({"type": "http.response.body", "body": data, "more_body": False})


class Stream(Response):
    """Sends events as they are made. An error after the beginning becomes an event, then the stream ends.

    Args:
        write_all: writes the events to the outlet that it is given.
        deadline: time of the event loop at which the stream ends with the error `late`.

    Attributes:
        at_end: what is closed when the stream ends, however it ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        write_all: Callable[[Outlet], Awaitable[None]],
        deadline: float | None = None,
        late: ApiError | None = None,
    ):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._write_all = write_all
        self._deadline = deadline
        self._late = late
        self.at_end = contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = Outlet(scope, send)
        with self.at_end:
            await outlet.begin(self.raw_headers)
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._run(outlet))

    async def _run(self, outlet: Outlet) -> None:
        error: ApiError | None = None
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._write_all(outlet)
        except ApiError as failure:
            error = failure
            log.warning("a stream ended early: %s", failure.message)
        except TimeoutError:
            error = self._late or internal()
        except Exception:
            log.exception("a stream failed")
            error = internal()
        await outlet.end(event(error.body()) if error is not None else b"")


class EventStream(Stream):
    """A stream of what an iterator gives."""

    def __init__(self, events: AsyncIterator[bytes]):
        async def write_all(outlet: Outlet) -> None:
            async for data in events:
                await outlet.write(data)

        super().__init__(write_all)
