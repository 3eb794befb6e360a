"""The HTTP process's end of the engine: starts its process, sends requests, hands out what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.asyncio

import labkit
from labkit.config import EngineConfig
from labkit.engine.metrics import EngineMetrics
from labkit.engine.outputs import OutputProcessor
from labkit.engine.request import EngineRequest
from labkit.engine.stats import EngineStats
from labkit.errors import ModelError
from labkit.models.tokenizer import Tokenizer
from labkit.outputs import RequestOutput
from labkit.server.errors import ApiError, internal
from labkit.server.messages import (
    Add,
    Cancel,
    Failed,
    FromEngine,
    Launch,
    Ready,
    Shutdown,
    Steps,
    Stop,
    ToEngine,
    decode_from_engine,
    encode,
)

SECONDS_TO_END = 5.0


class Generation:
    """The answers to the prompts of one HTTP request.

    `outputs` are live: the engine's steps go on changing them. A reader that is slow therefore misses nothing and
    fills no queue; it only gets larger pieces.
    """

    def __init__(self, engine: EngineClient, request_ids: Sequence[str], outputs: Sequence[RequestOutput]):
        self._engine = engine
        self._request_ids = request_ids
        self.outputs = outputs
        self._event = asyncio.Event()
        self._error: ApiError | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    async def news(self) -> None:
        """Wait until a step has changed some output since the last call.

        Raises:
            ApiError: the engine failed, or the server ends before the answer does.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        self._event.clear()

    def notice(self) -> None:
        self._event.set()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._event.set()

    def close(self) -> None:
        """End what still runs of it. Call it whatever happened; a second call does nothing."""
        self._engine.forget(self._request_ids)


class EngineClient:
    """Requests to the engine process and its answers to whom they belong."""

    def __init__(self) -> None:
        self.metrics = EngineMetrics()
        self.stats = EngineStats()
        self.config = EngineConfig()
        self.dead: str | None = None  # why the engine is gone
        self._folder = tempfile.mkdtemp(prefix="labkit-")
        self.address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._process: asyncio.subprocess.Process | None = None
        self._processor: OutputProcessor | None = None
        self._open: dict[str, Generation] = {}
        self._stopped: dict[tuple[str, int], int] = {}  # answers ended here → number of the message that says so
        self._adds: dict[int, int] = {}  # number of an Add the engine has not read yet → its answers
        self._sent = 0
        self._requests = 0
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # nobody may be waiting
        self._tasks = [asyncio.create_task(self._read())]

    # ----------------------------------------------------------------------------------- the process

    async def spawn(self) -> None:
        """Start the engine's process; it waits for `launch`."""
        # Not multiprocessing: its child would run the caller's main module again, a notebook's or a script's.
        root = str(Path(labkit.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "labkit.server.process",
            self.address,
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._tasks.append(asyncio.create_task(self._watch(self._process)))

    async def launch(self, model: str, config: EngineConfig, trace: str | None, tokenizer: Tokenizer) -> Ready:
        """Load the model. Raises ModelError with the reason if that fails."""
        self._processor = OutputProcessor(tokenizer)
        self._send(Launch(model, config, trace))
        ready = await self._ready
        self.config, self.stats = ready.config, ready.stats
        return ready

    async def close(self) -> None:
        """End the engine's process and give back the socket."""
        if self._process is not None and self._process.returncode is None:
            if self._ready.done():
                self._send(Shutdown())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._process.wait(), SECONDS_TO_END)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        while await self._socket.poll(100):  # its last words
            await asyncio.sleep(0.01)
        self._died(f"the engine's process ended with status {status}")

    def _died(self, reason: str) -> None:
        self.dead = reason
        if not self._ready.done():
            self._ready.set_exception(ModelError(reason))
        self.fail_all(internal("the engine has ended; this request is lost"))

    # ----------------------------------------------------------------------------------- requests

    def new_id(self) -> str:
        self._requests += 1
        return f"r{self._requests}"

    def submit(self, requests: Sequence[EngineRequest], texts: Sequence[str | None]) -> Generation:
        """Send the requests, one for each prompt of an HTTP request. Raises ApiError when the engine is gone."""
        if self.dead is not None or self._processor is None:
            raise internal("the engine has ended; the server must be started again")
        outputs = [self._processor.add(request, text) for request, text in zip(requests, texts, strict=True)]
        generation = Generation(self, [request.request_id for request in requests], outputs)
        for request in requests:
            self._open[request.request_id] = generation
            self._send(Add(request))
            self._adds[self._sent] = request.params.n
        return generation

    def waiting(self) -> int:
        """Answers that wait for a place: those the engine told of, and those on their way that find no free one."""
        on_their_way = sum(self._adds.values())
        free = self.config.max_num_seqs - self.stats.running if self.stats.waiting == 0 else 0
        return self.stats.waiting + max(0, on_their_way - max(0, free))

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._open.pop(request_id, None) is not None and self._processor is not None:
                self._processor.discard(request_id)
                self._send(Cancel(request_id))

    def fail_all(self, error: ApiError) -> None:
        """End every open request with this error."""
        for generation in list(self._open.values()):
            generation.fail(error)

    def _send(self, message: ToEngine) -> None:
        self._sent += 1
        if self.dead is None:
            self._socket.send(encode(message))

    # ----------------------------------------------------------------------------------- answers

    async def _read(self) -> None:
        while True:
            message = decode_from_engine(await self._socket.recv())
            self._take(message)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Ready():
                self._ready.set_result(message)
            case Failed(message=reason):
                if not self._ready.done():
                    self._ready.set_exception(ModelError(reason))
            case Steps():
                self._take_steps(message)

    def _take_steps(self, message: Steps) -> None:
        assert self._processor is not None
        report = message.report
        # An answer that a stop string ended here may have gone on there until the engine was told.
        report.deltas = [d for d in report.deltas if (d.request_id, d.index) not in self._stopped]
        done = self._processor.process(report.deltas)
        for request_id, index, stop in done.stops:
            self._send(Stop(request_id, index, stop))
            self._stopped[request_id, index] = self._sent
        self._stopped = {key: number for key, number in self._stopped.items() if number > message.received}
        self._adds = {number: n for number, n in self._adds.items() if number > message.received}
        self.stats = message.stats
        self.metrics.observe(report, message.stats)
        for request_id in done.errors:
            self._send(Cancel(request_id))
        for output in done.outputs:
            self._hand_out(output, done.errors.get(output.request_id))

    def _hand_out(self, output: RequestOutput, error: str | None) -> None:
        generation = self._open.get(output.request_id)
        if generation is None:
            return
        if output.finished:
            del self._open[output.request_id]
        if error is not None:
            generation.fail(internal("the engine failed in a step of this request, which is lost; try it again"))
        else:
            generation.notice()
