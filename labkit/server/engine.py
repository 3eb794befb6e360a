"""The HTTP process's end of the engine: sends requests, hands out what comes back, starts it again when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from labkit.config import EngineConfig
from labkit.engine.metrics import EngineMetrics
from labkit.engine.outputs import OutputProcessor
from labkit.engine.request import Delta, EngineRequest, StepReport
from labkit.engine.settings import Settings
from labkit.engine.stats import EngineStats
from labkit.errors import ModelError
from labkit.models.tokenizer import Tokenizer
from labkit.outputs import RequestOutput
from labkit.server.child import Child
from labkit.server.errors import ApiError, internal, overloaded
from labkit.server.generation import Generation
from labkit.server.messages import (
    Add,
    Cancel,
    Change,
    Failed,
    FromEngine,
    Launch,
    Looked,
    Ready,
    Steps,
    Stop,
    ToEngine,
)
from labkit.server.questions import Questions
from labkit.server.restarts import Restarts

SECONDS_OF_SILENCE = 120.0  # of an engine that has work; a step is shorter, the compilation of a kernel too
LOST = "the engine has ended; this request is lost"
log = logging.getLogger("labkit.server")


class EngineClient:
    """Requests to the engine process and its answers to whom they belong.

    Attributes:
        config: as it was launched; once the model is loaded with every "auto" and None decided.
        settings: what of it may change, as it is now.
        dead: why no engine is there, while that is so.
        given_up: it has ended too often, and stays dead.
    """

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.stats = EngineStats()
        self.config = EngineConfig()
        self.settings = Settings.of(self.config)
        self.questions = Questions(self._send)
        self.dead: str | None = None
        self.given_up = False
        self.child = self._new_child()
        self._launch: Launch | None = None
        self._processor: OutputProcessor | None = None
        self._open: dict[str, tuple[Generation, RequestOutput]] = {}
        self._stopped: dict[tuple[str, int], int] = {}  # answers ended here → number of the message that says so
        self._adds: dict[int, int] = {}  # number of an Add the engine has not read yet → its answers
        self._requests = 0
        self._heard = time.monotonic()  # when the engine last said something, or had nothing to do
        self._restarts = Restarts()
        self._restarting: asyncio.Task[None] | None = None
        self._running = False  # it has been ready and has not ended

    # ----------------------------------------------------------------------------------- the process

    async def launch(self, launch: Launch, tokenizer: Tokenizer) -> Ready:
        """Load the model in the process that was spawned. Raises ModelError with the reason if that fails."""
        self._processor = OutputProcessor(tokenizer)
        self._launch = launch
        return await self._load(launch)

    async def _load(self, launch: Launch) -> Ready:
        self.child.send(launch)
        return await self._ready

    def _new_child(self) -> Child:
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # nobody may be waiting
        return Child(self._take, self._ended)

    async def close(self) -> None:
        """End the engine's process and whatever waits for another."""
        self._running = False
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        await self.child.close(orderly=self._ready.done())

    async def _ended(self, reason: str) -> None:
        """The process is gone, and with it every open request."""
        was_running, self._running = self._running, False
        self.dead = reason
        if not self._ready.done():
            self._ready.set_exception(ModelError(reason))
        self.fail_all(internal(LOST))
        self.questions.fail(internal("the engine has ended"))
        # As if a last step had failed all of them: so the metrics count them, and nothing seems to run.
        lost = [
            Delta(request_id, choice.index, finish_reason="abort", error=LOST, choices=len(output.outputs))
            for request_id, (_, output) in self._open.items()
            for choice in output.outputs
            if choice.finish_reason is None
        ]
        await self._take_steps(Steps(StepReport(lost), EngineStats(), self.child.sent))
        if was_running:
            self._restarting = asyncio.create_task(self._restart(reason))

    async def _restart(self, reason: str) -> None:
        assert self._launch is not None
        while (pause := self._restarts.pause(time.monotonic())) is not None:
            log.error("%s; it is started again in %g s", reason, pause)
            await self.child.close(orderly=False)
            await asyncio.sleep(pause)
            self.child = self._new_child()
            try:
                await self.child.spawn()
                await self._load(msgspec.structs.replace(self._launch, trace=unused(self._launch.trace)))
            except (ModelError, OSError) as error:
                reason = str(error)
            else:
                log.warning("the engine runs again")
                return
        self.given_up = True
        log.critical("%s; that was too often, it is not started again: start the server anew", reason)

    def check(self) -> None:
        """Raises ApiError while there is no engine to take a request."""
        if self.given_up:
            raise internal("the engine has ended; the server must be started again")
        if self.dead is not None:
            raise overloaded("the engine has ended and is being started again; try again soon", seconds=5)

    @property
    def trouble(self) -> str | None:
        """What is wrong with the engine, for /health; None when nothing is."""
        if self.dead is not None:
            return "the engine has ended" if self.given_up else "the engine has ended and is being started again"
        silence = time.monotonic() - self._heard
        if self._open and silence > SECONDS_OF_SILENCE:
            return f"the engine has work and has not said anything for {silence:.0f} s"
        return None

    # ----------------------------------------------------------------------------------- requests

    def new_id(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def submit(self, requests: Sequence[EngineRequest], texts: Sequence[str | None]) -> Generation:
        """Send the requests, one for each prompt of an HTTP request. Raises ApiError when the engine is gone."""
        self.check()
        assert self._processor is not None
        if not self._open:
            self._heard = time.monotonic()
        outputs = [self._processor.add(request, text) for request, text in zip(requests, texts, strict=True)]
        generation = Generation(outputs, lambda: self._forget([request.request_id for request in requests]))
        for request, output in zip(requests, outputs, strict=True):
            self._open[request.request_id] = (generation, output)
            self._send(Add(request))
            self._adds[self.child.sent] = request.params.n
        return generation

    def waiting(self, more: int = 0) -> int:
        """Answers that wait for a place, if `more` came now: those the engine told of, and those that find no free one.

        On their way are also those that the engine has not read yet.
        """
        on_their_way = sum(self._adds.values()) + more
        free = (self.settings.max_num_seqs or 0) - self.stats.running if self.stats.waiting == 0 else 0
        return self.stats.waiting + max(0, on_their_way - max(0, free))

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._open.pop(request_id, None) is not None and self._processor is not None:
                self._processor.discard(request_id)
                self._send(Cancel(request_id))

    def fail_all(self, error: ApiError) -> None:
        """End every open request with this error."""
        for generation, _ in list(self._open.values()):
            generation.fail(error)

    async def change(self, settings: Settings) -> None:
        """Comes back once they hold. Raises RequestError for one that cannot be, ApiError without an engine."""
        settings.check(self.config)
        self.check()
        self.settings = (await self.questions.ask(Change(settings))).settings

    def _send(self, message: ToEngine) -> None:
        self.child.send(message)

    # ----------------------------------------------------------------------------------- answers

    async def _take(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        match message:
            case Ready():
                self.dead, self._running = None, True
                self.config, self.stats = message.config, message.stats
                self.settings = Settings.of(message.config)
                self._ready.set_result(message)
            case Failed(message=reason):
                if not self._ready.done():
                    self._ready.set_exception(ModelError(reason))
            case Steps():
                await self._take_steps(message)
            case Looked():
                self.questions.answer(message)

    async def _take_steps(self, message: Steps) -> None:
        if self._processor is None:
            return  # it ended before it was launched
        report = message.report
        # An answer that a stop string ended here may have gone on there until the engine was told.
        report.deltas = [d for d in report.deltas if (d.request_id, d.index) not in self._stopped]
        done = self._processor.process(report.deltas)
        for request_id, index, stop in done.stops:
            self._send(Stop(request_id, index, stop))
            self._stopped[request_id, index] = self.child.sent
        self._stopped = {key: number for key, number in self._stopped.items() if number > message.received}
        self._adds = {number: n for number, n in self._adds.items() if number > message.received}
        self.stats = message.stats
        self.metrics.observe(report, message.stats)
        for request_id in done.errors:
            self._send(Cancel(request_id))
        for output in done.outputs:
            await self._hand_out(output, done.errors.get(output.request_id))

    async def _hand_out(self, output: RequestOutput, error: str | None) -> None:
        generation, _ = self._open.get(output.request_id, (None, None))
        if generation is None:
            return
        if output.finished:
            del self._open[output.request_id]
        if error is not None:
            log.error("request %s: %s", output.request_id, error, extra={"request_id": generation.http_id})
            generation.fail(internal("the engine failed in a step of this request, which is lost; try it again"))
        else:
            await generation.notice(output)


def unused(trace: str | None) -> str | None:
    """A name beside that of the trace: the clock and the requests of another engine begin anew."""
    if trace is None:
        return None
    path, number = Path(trace), 1
    while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return str(other)
