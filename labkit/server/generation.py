"""The answers to the prompts of one HTTP request, while they are being made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from labkit.outputs import RequestOutput
from labkit.server.logs import current_request_id


class Generation:
    """What a request waits for: its first news, each news, its end.

    Attributes:
        outputs: live: the engine's steps go on changing them.
        http_id: the x-request-id of the request, for the log.
    """

    def __init__(self, outputs: Sequence[RequestOutput], forget: Callable[[], None]):
        self.outputs = outputs
        self.http_id = current_request_id.get()
        self._forget = forget
        self._unfinished = len(outputs)
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()
        self._write: Callable[[], Awaitable[None]] | None = None
        self._error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    async def begun(self) -> None:
        """Wait for the first step that gave something. Raises what `ended` raises."""
        await self._begun.wait()
        self._raise()

    async def ended(self) -> None:
        """Wait until every answer is complete.

        Raises:
            ApiError: the engine failed, or the server ends before the answers do.
        """
        await self._ended.wait()
        self._raise()

    async def follow(self, write: Callable[[], Awaitable[None]]) -> None:
        """Call `write` now and after every step that gave something, until the end. Raises what it or `ended` raises.

        It is called by the one task that reads what the engine sends: waking a task for every stream and step
        would cost more than the writing does. So it must not wait for anything.
        """
        await write()
        if not self.finished:
            self._write = write
            try:
                await self.ended()
            finally:
                self._write = None

    async def notice(self, output: RequestOutput) -> None:
        """A step gave something to this one of `outputs`."""
        self._unfinished -= output.finished
        self._begun.set()
        if self._write is not None and self._error is None:
            try:
                await self._write()
            except Exception as error:  # this stream's own trouble
                self.fail(error)
        if self.finished:
            self._ended.set()

    def fail(self, error: Exception) -> None:
        """It ends here; the first reason counts."""
        self._error = self._error or error
        self._begun.set()
        self._ended.set()

    def close(self) -> None:
        """End what still runs of it. Call it whatever happened; a second call does nothing."""
        self._forget()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
