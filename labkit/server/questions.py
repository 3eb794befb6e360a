"""What the HTTP process asks the engine and waits to hear: a look, or a change of settings."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from labkit.server.errors import ApiError
from labkit.server.messages import Change, Look, Looked


class Questions:
    """Questions that are on their way; the engine answers them in order.

    Args:
        send: takes a message to the engine.
    """

    def __init__(self, send: Callable[[Look | Change], None]):
        self._send = send
        self._open: collections.deque[asyncio.Future[Looked]] = collections.deque()

    async def ask(self, question: Look | Change) -> Looked:
        """The engine between two steps. Raises ApiError when it ends before it answers."""
        answer: asyncio.Future[Looked] = asyncio.get_running_loop().create_future()
        self._open.append(answer)
        self._send(question)
        return await answer

    def answer(self, looked: Looked) -> None:
        answer = self._open.popleft()
        if not answer.done():  # whoever asked may have gone
            answer.set_result(looked)

    def fail(self, error: ApiError) -> None:
        """The engine has ended."""
        while self._open:
            answer = self._open.popleft()
            if not answer.done():
                answer.set_exception(error)
