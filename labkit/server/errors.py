"""The errors that an HTTP client can meet, each in the OpenAI shape `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from typing import Any

from labkit.errors import RequestError


class ApiError(Exception):
    """An answer that is an error. `headers` go with it, `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        type: str,
        code: str | None,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, "invalid_request_error", code, message, param)


def from_request_error(error: RequestError, param: str | None) -> ApiError:
    """What the engine refuses; `param` is the name that the client used for the field."""
    return bad_request(str(error), param, error.code)


def invalid_key(message: str) -> ApiError:
    return ApiError(401, "authentication_error", "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def model_not_found(name: str, served: str) -> ApiError:
    message = f"the model {name[:200]!a} is not served here; {served!r} is"
    return ApiError(404, "invalid_request_error", "model_not_found", message, "model")


def body_too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes, which is the most that this server takes (--max-body-bytes)"
    return ApiError(413, "invalid_request_error", "body_too_large", message)


def unsupported_media(message: str) -> ApiError:
    return ApiError(415, "invalid_request_error", "invalid_value", message)


def rate_limited(seconds: float) -> ApiError:
    wait = max(1, math.ceil(seconds))
    message = f"too many requests with this key; try again in {wait} s"
    return ApiError(429, "rate_limit_error", "rate_limit_exceeded", message, headers={"retry-after": str(wait)})


def overloaded(message: str, seconds: int = 1) -> ApiError:
    return ApiError(503, "overloaded_error", "overloaded", message, headers={"retry-after": str(seconds)})


def timed_out(seconds: float) -> ApiError:
    message = f"the answer was not ready within {seconds:g} s, the limit of this server (--request-timeout)"
    return ApiError(504, "timeout_error", "timeout", message)


def body_too_slow(seconds: float) -> ApiError:
    return ApiError(408, "timeout_error", "timeout", f"the body did not come within {seconds:g} s")


def too_slow(unsent: int) -> ApiError:
    """Only ever in a stream, which has its status 200 already."""
    message = f"the client reads too slowly: {unsent} bytes of the answer wait for it; the rest is not made"
    return ApiError(408, "timeout_error", "timeout", message)


def internal(message: str = "something failed inside the server; its log says what") -> ApiError:
    return ApiError(500, "server_error", "internal_error", message)
