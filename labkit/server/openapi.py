"""What /openapi.json says. The routes read their bodies themselves, so FastAPI has to be told what they take."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from labkit.server.access import OPEN_PATHS
from labkit.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SettingsRequest,
    Strict,
    TokenizeRequest,
)

BODIES: dict[str, type[Strict]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/dashboard/settings": SettingsRequest,
}
TEXT_OR_NULL = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": TEXT_OR_NULL,
                "code": TEXT_OR_NULL,
            },
        }
    },
}
RESPONSES = {
    "200": {"description": "The answer: JSON, or server-sent events when `stream` is true"},
    "default": {
        "description": "What went wrong",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    },
}


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` complete: bodies, errors, and which paths need a key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas: dict[str, Any] = {"Error": ERROR}
            for path, kind in BODIES.items():
                body = kind.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= body.pop("$defs", {})
                content = {"application/json": {"schema": body}}
                schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    operation["responses"] = RESPONSES
                    operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
            key = {"type": "http", "scheme": "bearer"}
            schema["components"] = {"schemas": schemas, "securitySchemes": {"key": key}}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
