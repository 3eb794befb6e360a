"""Starting and ending the server: as a command (`run`), or in a thread beside a notebook (`start`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn

from labkit.config import EngineConfig
from labkit.errors import LabkitError
from labkit.server.app import build_app
from labkit.server.config import ServerConfig
from labkit.server.connection import SECONDS_IDLE, Connection
from labkit.server.logs import set_up
from labkit.server.security import DEV_KEY, Keys, check_environment
from labkit.server.service import Service

log = logging.getLogger("labkit.server")
SECONDS_FOR_LAST_BYTES = 2


class Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM must go on answering until the last request is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """A port, and the server behind it.

    Raises:
        LabkitError: the port cannot be had, or production lacks a key.
    """

    def __init__(self, model: str, engine: EngineConfig, config: ServerConfig):
        check_environment(os.environ.get("LABKIT_ENVIRONMENT", ""), config.api_keys)
        self._model = model
        self._engine = engine
        self._config = config
        self._socket = bind(config.host, config.port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._stop = asyncio.Event()  # end, but let finish what runs
        self._stop_now = asyncio.Event()

    async def serve(self, on_ready: Callable[[Service], None]) -> None:
        """Answer until told to stop. Raises ModelError if the model cannot be loaded."""
        service = Service(self._model, self._config)
        web = Uvicorn(uvicorn_config(build_app(service, Keys(self._config.api_keys))))
        serving = asyncio.create_task(web.serve(sockets=[self._socket]))
        loading = asyncio.create_task(service.load(self._engine))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({loading, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                on_ready(service)
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            await service.drain(self._config.drain_seconds, self._stop_now)
        finally:
            service.closing.set()
            web.should_exit = True
            loading.cancel()
            stopping.cancel()
            await asyncio.gather(serving, loading, stopping, return_exceptions=True)
            self._socket.close()
            await service.engine.close()
            await asyncio.to_thread(service.spans.close)
        serving.result()

    def drain(self) -> None:
        """Stop taking requests, end when the last one is answered; a second call ends the server now."""
        log.info(
            "ending now" if self._stop.is_set() else "draining: no new requests; the end when the last is answered"
        )
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def stop(self) -> None:
        """End now, whatever runs."""
        self._stop_now.set()
        self._stop.set()


def run(model: str, engine: EngineConfig, server: ServerConfig) -> int:
    """`labkit serve`: returns 0 after SIGTERM.

    Raises:
        LabkitError: it cannot start.
        KeyboardInterrupt: Ctrl-C, once everything is put away.
    """
    set_up(server.log_level, server.log_format)
    if asyncio.run(_run(model, engine, server)):
        raise KeyboardInterrupt
    return 0


async def _run(model: str, engine: EngineConfig, config: ServerConfig) -> bool:
    """Serve until a signal; True if it was Ctrl-C."""
    server = Server(model, engine, config)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        server.stop()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.drain)
    loop.add_signal_handler(signal.SIGINT, interrupt)

    def announce(service: Service) -> None:
        key = "" if config.api_keys else f" with the key {DEV_KEY} (from this machine only)"
        line = f"labkit serves {service.name} at {server.url}/v1{key}; watch it at {server.url}/dashboard"
        if config.log_format == "json":
            log.info(line)
        else:
            print(line, file=sys.stderr)

    await server.serve(announce)
    return interrupted


class ServerHandle:
    """A server that runs in a thread of this process; also a context manager.

    Attributes:
        url: where it answers, without a path.
    """

    def __init__(self, server: Server):
        self.url = server.url
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="labkit-server", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Raises ModelError if the model cannot be loaded."""
        self._started.result()

    def stop(self) -> None:
        """End it and wait until it has gone; its port is free then. A second call does nothing."""
        self._call(self._server.stop)
        self._thread.join()

    def drain(self) -> None:
        """What SIGTERM does to `labkit serve`: no new requests, and an end when the last one is answered."""
        self._call(self._server.drain)

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended. Raises TimeoutError if that takes longer."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the server still runs after {seconds} s")

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended already
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._server.serve(lambda _: self._started.set_result(None)))
            except Exception as error:
                if self._started.done():
                    raise
                self._started.set_exception(error)

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(model: str, engine: EngineConfig | None = None, server: ServerConfig | None = None) -> ServerHandle:
    """Serve in a thread with an event loop of its own, as in a notebook; returns once the model is loaded.

    Args:
        server: its default port is any free one here; the handle's `url` says which.

    Raises:
        LabkitError: the port cannot be had, or the model cannot be loaded.
    """
    handle = ServerHandle(Server(model, engine or EngineConfig(), server or ServerConfig(port=0)))
    try:
        handle.wait_ready()
    except BaseException:
        handle.stop()
        raise
    return handle


def uvicorn_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=SECONDS_IDLE,
        server_header=False,
        timeout_graceful_shutdown=SECONDS_FOR_LAST_BYTES,
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises LabkitError that says why not."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # asyncio sets TCP_NODELAY on what it accepts only if the listener is known to be TCP. Without it an event waits
        # until the client's system has acknowledged the one before, which it may put off for 40 ms.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = "in use by another program" if error.errno == errno.EADDRINUSE else error.strerror
        raise LabkitError(
            f"cannot listen on {host}, port {port}: {reason}; choose another with --host, --port"
        ) from None
    return listener


__all__ = ["Server", "ServerConfig", "ServerHandle", "run", "start"]
