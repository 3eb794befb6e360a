"""What every request passes, whatever its path: an id, the key, the count, the log, and an answer if all else fails.

Plain ASGI: nothing stands between a route and the client's going away.
"""

from __future__ import annotations

import logging
import time
import uuid

from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from labkit.server.errors import ApiError, internal
from labkit.server.pages import PAGES
from labkit.server.security import Keys
from labkit.server.stream import json_response

log = logging.getLogger("labkit.server")

OPEN_PATHS = ("/health", "/ready", "/version", "/docs", "/openapi.json", *PAGES)
KEYED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/metrics",
    "/dashboard/events",
    "/dashboard/settings",
)
CLIENT_GONE = 499  # nobody receives it; the log and the metrics have it
LONGEST_ID = 200


def error_response(error: ApiError) -> Response:
    response = json_response(error.body(), error.status)
    response.headers.update(error.headers)
    return response


def path_label(path: str) -> str:
    """The path for the metrics. Paths that clients invent share one label, or they would make the metrics grow."""
    if path in OPEN_PATHS or path in KEYED_PATHS:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def request_id(given: str | None) -> str:
    """The client's own id, as far as it is printable ASCII; else a new one."""
    own = "".join(c for c in given or "" if " " <= c <= "~")[:LONGEST_ID].strip()
    return own or uuid.uuid4().hex


class Access:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        self._app = app
        self._count = Counter("labkit_http_requests", "HTTP requests", ["path", "status"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.perf_counter(), None
        own_id = request_id(Headers(scope=scope).get("x-request-id"))

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own_id
                self._count.labels(path_label(scope["path"]), str(status)).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            log.exception("request %s failed", own_id)
            if status is None:
                await error_response(internal())(scope, receive, send_counted)
        finally:
            milliseconds = 1e3 * (time.perf_counter() - begin)
            line = '%s %s "%s" %s %.0f ms'
            log.info(line, own_id, scope["method"], ascii(scope["path"])[1:-1], status, milliseconds)


class KeyCheck:
    """Lets the open paths through, and the rest with a key; before a byte of the body is read."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                scope["labkit.key"] = self._keys.check(
                    given[0] if len(given) == 1 else None, (scope.get("client") or [None])[0]
                )
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
