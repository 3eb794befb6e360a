"""What the dashboard is fed with. The engine is looked at only while somebody watches, and once for all who do."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from labkit.engine.settings import Settings
from labkit.server.messages import Look, Looked
from labkit.server.sensors import ProcessSensor
from labkit.server.stream import event

if TYPE_CHECKING:
    from labkit.server.service import Service

SECONDS_BETWEEN_LOOKS = 0.5
PAUSE_FOR_LOOK = 200.0  # a look that takes the engine a millisecond is followed by a fifth of a second without one
SECONDS_BETWEEN_READINGS = 1.0


class Watch:
    """The events of /dashboard/events.

    Each stands for itself: a page that is slow, or comes late, has missed history and nothing else.
    """

    def __init__(self, service: Service):
        self._service = service
        self._looking = asyncio.Lock()
        self._latest = b""
        self._number = 0  # of the latest event
        self._due = 0.0  # when the next look may be, on the event loop's clock
        self._process = ProcessSensor()
        self._machine: dict[str, Any] | None = None
        self._readings_due = 0.0

    async def events(self) -> AsyncIterator[bytes]:
        """One after another until the server ends. Raises ApiError when the engine does."""
        closing = asyncio.ensure_future(self._service.closing.wait())
        upcoming, seen = None, self._number
        try:
            while not closing.done():
                upcoming = asyncio.ensure_future(self._event_after(seen))
                await asyncio.wait({upcoming, closing}, return_when=asyncio.FIRST_COMPLETED)
                if upcoming.done():
                    data, seen = upcoming.result()
                    yield data
        finally:
            closing.cancel()
            if upcoming is not None:
                upcoming.cancel()

    async def _event_after(self, seen: int) -> tuple[bytes, int]:
        """The latest event and its number. Of all who wait for a new one, the first makes it."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if self._number == seen:
                await asyncio.sleep(self._due - loop.time())
                numbers, pause = await self._look()
                self._latest = event(numbers)
                self._number += 1
                self._due = loop.time() + pause
            return self._latest, self._number

    async def _look(self) -> tuple[dict[str, Any], float]:
        """The numbers of an event, and how long to wait with the next."""
        service, engine = self._service, self._service.engine
        state = {"model": service.name, "time": time.time(), "state": service.state}
        if service.state == "loading":
            return {**state, **dataclasses.asdict(engine.stats)}, SECONDS_BETWEEN_LOOKS
        engine.check()
        looked = await engine.questions.ask(Look())
        now = time.monotonic()
        if now >= self._readings_due:
            self._readings_due = now + SECONDS_BETWEEN_READINGS
            self._machine = await self._read_machine(looked)
        numbers = {
            **state,
            **dataclasses.asdict(looked.stats),
            "ttft": engine.metrics.recent_ttft.percentiles(now),
            "gap": engine.metrics.recent_gaps.percentiles(now),
            "chat": service.loaded.tokenizer.chat_template.source is not None,
            "block_size": engine.config.block_size,
            "speculative": engine.config.speculative is not None,
            "settings": looked.settings,
            "most": Settings.of(engine.config),
            "machine": self._machine,
            "picture": looked.picture,
        }
        return numbers, max(SECONDS_BETWEEN_LOOKS, PAUSE_FOR_LOOK * looked.picture.seconds)

    async def _read_machine(self, looked: Looked) -> dict[str, Any]:
        """With the engine's clock and tokens at that moment, so that joules and tokens are of the same time."""
        return {
            "t": looked.picture.t,
            "tokens_out": looked.stats.tokens_out,
            "process": self._process.read(self._service.engine.child.pid),
            "gpu": await asyncio.to_thread(self._service.gpu.read),
        }
