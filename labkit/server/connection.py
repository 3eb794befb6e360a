"""One connection: uvicorn's protocol, with an end to everything that a client can make it wait for or keep.

head        SECONDS_FOR_HEAD from the first moment to the end of the request's header, and at most MAX_HEAD bytes
body        whoever reads it has a limit of its own (`app.read`); of one that nobody reads the connection ends
answer      is never held back: what the client does not take is kept, a stream looks at `unsent` and gives up
after it    SECONDS_IDLE for the next request; what is still unsent must get less in every SECONDS_STALLED
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

SECONDS_FOR_HEAD = 20.0
SECONDS_IDLE = 5
SECONDS_STALLED = 30.0
MAX_HEAD = 64 * 1024
UNLIMITED = 1 << 60
UNSENT = "labkit.unsent"
LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 96\r\n\r\n"
    b'{"error":{"message":"the header was late","type":"timeout_error","param":null,"code":"timeout"}}'
)


def unsent_of(scope: Scope) -> Callable[[], int]:
    """How many bytes of its answers a client has not taken yet."""
    unsent: Callable[[], int] = scope["state"][UNSENT]
    return unsent


class Connection(HttpToolsProtocol):
    """See the head of this file. Callbacks without a docstring are uvicorn's or asyncio's."""

    def __init__(self, *args: Any, **fields: Any):
        super().__init__(*args, **fields)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_body = False
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn would make the writer wait; here one writer serves all streams, so it must not.
        transport.set_write_buffer_limits(high=UNLIMITED)
        self.app_state = {**self.app_state, UNSENT: transport.get_write_buffer_size}
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            if self._head_timer is None:
                self._expect_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The header is too long.")

    def on_headers_complete(self) -> None:
        self._cancel_head()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD:
            raise ValueError("it came whole, but too long")  # ends the parser; uvicorn answers 400
        self._in_body = True
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete] + [self.cycle]

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body:  # nobody wants the rest: it may come, but not for ever
            self._expect_head()
        self._watch_reader(UNLIMITED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head()
        # uvicorn tells only the last of several requests that were sent without waiting.
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._cancel_head()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(SECONDS_FOR_HEAD, self._late)

    def _cancel_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()

    def _watch_reader(self, before: int) -> None:
        """Give up a client that takes nothing of what is left for it; an orderly close would wait for it."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            self.transport.abort()
        elif left:
            self.loop.call_later(SECONDS_STALLED, self._watch_reader, left)
