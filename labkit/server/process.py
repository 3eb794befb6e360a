"""The engine's own process: `python -m labkit.server.process ADDRESS`.

    wait for messages (or only look, while there is work) → add, cancel, stop → one step → tell → again

Standard input is a lifeline: when the HTTP process goes, however it goes, it is closed, and this process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback

import zmq

from labkit.engine.core import EngineCore
from labkit.engine.picture import MOST_EVENTS
from labkit.engine.request import Delta, EngineRequest, StepReport
from labkit.engine.settings import Settings
from labkit.engine.trace import Trace
from labkit.errors import LabkitError, RequestError
from labkit.server.messages import (
    Add,
    Cancel,
    Change,
    Failed,
    FromEngine,
    Launch,
    Look,
    Looked,
    Ready,
    Shutdown,
    Steps,
    Stop,
    ToEngine,
    decode_to_engine,
    encode,
)

MILLISECONDS_FOR_LAST_WORDS = 2000


class EngineLoop:
    """Drives a core by messages until Shutdown, or until the lifeline is cut.

    Args:
        core: the engine.
        socket: connected to the HTTP process.
        lifeline: file descriptor that becomes readable when nobody is there any more; None without one.
    """

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], lifeline: int | None = None, received: int = 0):
        self.core = core
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._lifeline = lifeline
        if lifeline is not None:
            self._poller.register(lifeline, zmq.POLLIN)
        self._received = received
        self._refused: list[Delta] = []
        self._open = True

    def run(self) -> None:
        self.send(Ready(self.core.limits, self.core.config, self.core.stats(), self.core.gpu_uuid))
        while self._open:
            news = self._read(wait=not self.core.has_work())
            if not self._open:
                break
            if self.core.has_work():
                report = self.core.step()
            elif news:
                report = StepReport([])  # nothing to compute, but the numbers have changed
            else:
                continue
            if not self.core.has_work():
                self.core.trace.flush()  # before the last answer goes out: who has it finds all of the trace
            report.deltas[:0] = self._refused
            self._refused.clear()
            self.send(Steps(report, self.core.stats(), self._received))

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def _read(self, wait: bool) -> bool:
        """Act on every message that has come; with `wait`, until there is one. True if there was one."""
        ready = dict(self._poller.poll(None if wait else 0))
        if self._lifeline in ready:
            self._open = False
        if self._socket not in ready:
            return False
        while self._open:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._received += 1
            self._act(decode_to_engine(message))
        return True

    def _act(self, message: ToEngine) -> None:
        match message:
            case Add(request=request):
                self._add(request)
            case Cancel(request_id=request_id):
                self.core.cancel(request_id)
            case Stop(request_id=request_id, index=index, stop=stop):
                self.core.stop(request_id, index, stop)
            case Look():
                self._show()
            case Change(settings=settings):
                with contextlib.suppress(RequestError):  # the answer shows that nothing has changed
                    self.core.change(settings)
                self._show()
            case Shutdown():
                self._open = False

    def _show(self) -> None:
        core = self.core
        self.send(Looked(core.picture(), Settings.of(core.config), core.stats()))

    def _add(self, request: EngineRequest) -> None:
        """The HTTP process has checked the request already; if the engine sees it differently, it is told so."""
        try:
            self.core.add_request(request)
        except RequestError as error:
            self._refused += [
                Delta(request.request_id, index, finish_reason="abort", error=str(error), choices=request.params.n)
                for index in range(request.params.n)
            ]


def main(address: str) -> int:
    """Load what the Launch message says and serve it; returns the exit status."""
    # Ctrl-C in a terminal reaches every process of the group; the HTTP process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)  # a slow reader must never hold up a step
        socket.linger = MILLISECONDS_FOR_LAST_WORDS  # and one that is gone must not keep this process
        socket.connect(address)
        if not _wait(socket, sys.stdin.fileno()):
            return 0
        launch = decode_to_engine(socket.recv())
        assert isinstance(launch, Launch)
        try:
            core = _load(launch)
        except Exception as error:
            if not isinstance(error, (LabkitError, ValueError, OSError)):
                traceback.print_exc()
            socket.send(encode(Failed(str(error) or type(error).__name__)))
            return 1
        try:
            EngineLoop(core, socket, lifeline=sys.stdin.fileno(), received=1).run()
        finally:
            core.close()
    return 0


def _wait(socket: zmq.Socket[bytes], lifeline: int) -> bool:
    """Wait for the first message; False if the HTTP process goes before it sends one."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(lifeline, zmq.POLLIN)
    return socket in dict(poller.poll())


def _load(launch: Launch) -> EngineCore:
    # Here only the picture reads events from memory, and only the last; a longer trace would fill up for minutes.
    trace = Trace(launch.trace, keep=MOST_EVENTS)
    return EngineCore(launch.model, launch.config, trace, launch.quiet)


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(status)  # all is put away; Python would spend half a second on taking its modules apart
