"""The engine's process as the HTTP process sees it: started, spoken to, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq
import zmq.asyncio

import labkit
from labkit.server.messages import FromEngine, Shutdown, ToEngine, decode_from_engine, encode

SECONDS_TO_END = 5.0


class Child:
    """One engine process and the socket to it.

    Args:
        on_message: gets everything that it says, in order.
        on_end: told once, with the reason, when it has ended by itself.

    Attributes:
        alive: it has been started and has not ended.
        sent: how many messages it was sent.
    """

    def __init__(self, on_message: Callable[[FromEngine], Awaitable[None]], on_end: Callable[[str], Awaitable[None]]):
        self.alive = True
        self.sent = 0
        self._on_message = on_message
        self._on_end = on_end
        self._folder = tempfile.mkdtemp(prefix="labkit-")
        self.address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks = [asyncio.create_task(self._read())]

    async def spawn(self) -> None:
        """Start the process; it waits for a Launch message."""
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

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        self.sent += 1
        if self.alive:
            self._socket.send(encode(message))

    async def died(self, reason: str) -> None:
        if self.alive:
            self.alive = False
            await self._on_end(reason)

    async def close(self, orderly: bool = True) -> None:
        """End the process and give back the socket; `orderly` lets it put away what it has."""
        self.alive = self.alive and orderly
        if self._process is not None and self._process.returncode is None:
            if self.alive:
                self.send(Shutdown())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._process.wait(), SECONDS_TO_END)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        self.alive = False
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*(t for t in self._tasks if t is not asyncio.current_task()), return_exceptions=True)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        while await self._socket.poll(100):  # its last words
            await asyncio.sleep(0.01)
        await self.died(f"the engine's process ended with status {status}")

    async def _read(self) -> None:
        while True:
            message = decode_from_engine(await self._socket.recv())
            if self.alive:  # else its end is known, and nobody wants to hear that it had work
                await self._on_message(message)
