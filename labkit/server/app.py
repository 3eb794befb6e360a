"""The routes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

import labkit
from labkit.engine.settings import Settings
from labkit.errors import RequestError
from labkit.server.access import CLIENT_GONE, Access, KeyCheck, error_response
from labkit.server.completions import Completion
from labkit.server.docs_page import docs_page
from labkit.server.errors import (
    ApiError,
    body_too_large,
    body_too_slow,
    from_request_error,
    internal,
    model_not_found,
    unsupported_media,
)
from labkit.server.openapi import describe
from labkit.server.pages import PAGES
from labkit.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SettingsRequest,
    Strict,
    TokenizeRequest,
    parse,
)
from labkit.server.security import Keys
from labkit.server.service import Service
from labkit.server.stream import ClientGone, EventStream, Stream, json_response, while_connected

SECONDS_FOR_BODY = 60.0
PARSED_AT_ONCE = 64 * 1024  # bytes; a larger body is parsed in a thread, so that nobody waits for it
Kind = TypeVar("Kind", bound=Strict)


def build_app(service: Service, keys: Keys) -> ASGIApp:
    """The whole server as one ASGI application."""
    app: ASGIApp = KeyCheck(build_routes(service), keys)
    if service.config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=service.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return Access(app, service.engine.metrics.registry, service.spans)


def build_routes(service: Service) -> FastAPI:
    app = FastAPI(title="labkit", version=labkit.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)  # in the middle of its body
    app.add_exception_handler(Exception, _on_fault)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_operations(app, service)
    _add_dashboard(app, service)
    describe(app)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    async def generate(request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        with contextlib.ExitStack() as until_answered:
            until_answered.enter_context(service.busy())
            arrival = asyncio.get_running_loop().time()
            service.admit(request.scope["labkit.key"])
            try:
                async with asyncio.timeout_at(service.deadline(arrival)):
                    wish = await read(request, kind, service.config.max_body_bytes)
            except TimeoutError:
                raise service.late() from None
            service.check_model(wish.model)
            service.check_count(wish)
            completion = Completion(service, wish, arrival)
            response = await while_connected(request.receive, completion.respond(until_answered))
            if isinstance(response, Stream):
                response.at_end = until_answered.pop_all()  # it is answered when the stream ends
            return response

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation; whole, or as server-sent events."""
        return await generate(request, ChatRequest)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue texts or token ids, one or several; whole, or as server-sent events."""
        return await generate(request, CompletionRequest)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt, or of messages as the model reads them."""
        wish = await read(request, TokenizeRequest, service.config.max_body_bytes)
        service.check_model(wish.model)
        async with service.tokenizing:
            return json_response(await asyncio.to_thread(service.tokenize, wish))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        wish = await read(request, DetokenizeRequest, service.config.max_body_bytes)
        service.check_model(wish.model)
        async with service.tokenizing:
            return json_response({"prompt": await asyncio.to_thread(service.detokenize, wish.tokens)})


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "labkit",
            "max_model_len": service.loaded.limits.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served, in a list of one."""
        return json_response({"object": "list", "data": [card()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        """The model that is served."""
        if model_id != service.name:
            raise model_not_found(model_id, service.name)
        return json_response(card())


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the process lives and the engine steps, else 503."""
        trouble = service.engine.trouble
        return json_response({"status": trouble or "ok"}, 200 if trouble is None else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """200 once the model is loaded and while new requests are taken, else 503."""
        return json_response({"ready": service.ready}, 200 if service.ready else 503)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return docs_page(app.openapi())

    @app.get("/version")
    async def version() -> Response:
        """The version of labkit."""
        return json_response({"version": labkit.__version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters, gauges and histograms, as Prometheus reads them."""
        return Response(service.engine.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_dashboard(app: FastAPI, service: Service) -> None:
    async def page(request: Request) -> Response:
        """The live page. It asks for a key, and holds no data before."""
        return PAGES[request.scope["path"]].response()

    for path in PAGES:
        app.add_api_route(path, page, include_in_schema=path == "/dashboard")

    @app.get("/dashboard/events")
    async def dashboard_events() -> Response:
        """The engine's numbers a few times a second, as server-sent events."""
        return EventStream(service.watch.events())

    @app.post("/dashboard/settings")
    async def dashboard_settings(request: Request) -> Response:
        """Change the running engine, from its next step on; answers what holds then."""
        wish = await read(request, SettingsRequest, service.config.max_body_bytes)
        service.check_model(wish.model)
        _ = service.loaded
        try:
            await service.engine.change(wish.settings())
        except RequestError as error:
            raise from_request_error(error, error.param) from None
        return json_response({"settings": service.engine.settings, "most": Settings.of(service.engine.config)})


# --------------------------------------------------------------------------------------- bodies and answers


async def read(request: Request, kind: type[Kind], limit: int) -> Kind:
    """The request in the body. Raises ApiError for whatever is wrong with it."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise unsupported_media("the body must be JSON, with the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise unsupported_media("a compressed body is not taken")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise body_too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS_FOR_BODY):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise body_too_large(limit)
    except TimeoutError:
        raise body_too_slow(SECONDS_FOR_BODY) from None
    if len(body) <= PARSED_AT_ONCE:
        return parse(bytes(body), kind)
    return await asyncio.to_thread(parse, bytes(body), kind)


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path[:200]!a}: {str(error.detail).lower()}"
    return error_response(
        ApiError(error.status_code, "invalid_request_error", code, message, headers=dict(error.headers or {}))
    )


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_fault(_: Request, __: Exception) -> Response:
    """A fault of the server's own. The exception goes on to `Access`, which logs it."""
    return error_response(internal())
