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
from labkit.server.logs import current_request_id
from labkit.server.pages import PAGES
from labkit.server.security import Keys
from labkit.server.spans import Spans
from labkit.server.stream import DIRECT_SEND, json_response

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
# A browser that shows an answer as a page runs nothing in it and takes nothing from anywhere; pages say what they need.
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
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

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, spans: Spans):
        self._app = app
        self._spans = spans
        self._count = Counter("labkit_http_requests", "HTTP requests", ["path", "status"], registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, status = time.perf_counter(), None
        own_id = request_id(Headers(scope=scope).get("x-request-id"))
        current_request_id.set(own_id)
        scope[DIRECT_SEND] = send

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = own_id
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                self._count.labels(path_label(scope["path"]), str(status)).inc()
            await send(message)

        with self._spans.request(scope, own_id) as answered:
            try:
                await self._app(scope, receive, send_counted)
            except Exception:
                log.exception("the request failed")
                if status is None:
                    await error_response(internal())(scope, receive, send_counted)
            finally:
                answered(status)
                _log_request(scope, status, 1e3 * (time.perf_counter() - begin))


def _log_request(scope: Scope, status: int | None, milliseconds: float) -> None:
    method, path = scope["method"], ascii(scope["path"])[1:-1]
    fields = {"method": method, "path": path, "status": status, "ms": round(milliseconds, 1)}
    log.info('%s "%s" %s %.0f ms', method, path, status, milliseconds, extra=fields)


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
