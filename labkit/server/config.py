"""The options of `labkit serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class ServerConfig:
    """How the server behaves; every field is an option of `labkit serve`.

    Attributes:
        port: 0 takes a free one.
        api_keys: without any, `dev-key` counts for clients on this machine.
        served_model_name: the name clients use; None takes the model's.
        max_queue: answers that may wait for a place, before new requests are refused (503).
        request_timeout: seconds from a request's arrival to the end of its answer; None has no limit.
        rate_limit: requests a second for each key, on the two paths that generate; None has no limit.
        rate_burst: requests that may come at once; None takes one second's worth.
        max_body_bytes: the largest body that is read.
        cors_origins: pages of these origins may call the server from a browser; "*" is every page.
        log_format: text for people, json for programs: one object a line.
        trace: file for the engine's trace.
        drain_seconds: how long SIGTERM waits for what runs.
        otlp_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span of every request.

    Raises:
        ValueError: naming the field, what was given and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_queue: int = 2048
    request_timeout: float | None = None
    rate_limit: float | None = None
    rate_burst: int | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    cors_origins: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"
    trace: str | None = None
    drain_seconds: float = 30.0
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it can be 0 (any free one) to 65535")
        for name in ("max_queue", "max_body_bytes", "rate_burst"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        for name in ("request_timeout", "rate_limit"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be above 0, or left out for no limit")
        if not (self.drain_seconds >= 0 and math.isfinite(self.drain_seconds)):
            raise ValueError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"log_level is {self.log_level!r}; it can be one of {', '.join(LOG_LEVELS)}")
        if self.log_format not in LOG_FORMATS:
            raise ValueError(f"log_format is {self.log_format!r}; it can be one of {', '.join(LOG_FORMATS)}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"otlp_endpoint is {self.otlp_endpoint!r}; it must be a URL such as http://127.0.0.1:4318")
        for key in self.api_keys:
            # A header can carry nothing else without quarrels about its encoding.
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("api_keys holds a key that is empty or has other characters than printable ASCII")
        if self.served_model_name == "":
            raise ValueError("served_model_name is empty; leave it out to serve the model under its own name")
