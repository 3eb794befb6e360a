"""OpenTelemetry spans of requests, for whoever runs a collector: `--otlp-endpoint http://127.0.0.1:4318`.

POST /v1/chat/completions          the whole request, under the caller's span if it sent a traceparent
├── queue                          from arrival in the engine to the first step
├── prefill                        to the first token
└── decode                         to the last
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

import labkit
from labkit.errors import LabkitError
from labkit.outputs import RequestOutput

SECONDS_TO_SEND = 5


class Spans:
    """Sends spans to a collector, in batches and from a thread of its own. Without an endpoint it does nothing.

    Raises:
        LabkitError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str | None):
        self._tracer = None
        if endpoint is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise LabkitError(f"--otlp-endpoint needs OpenTelemetry: pip install 'labkit[otel]' ({error})") from None
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "labkit", "service.version": labkit.__version__})
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=SECONDS_TO_SEND)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("labkit")

    @contextlib.contextmanager
    def request(self, scope: Scope, request_id: str) -> Iterator[Callable[[int | None], None]]:
        """Around the handling of a request; it gives a function that wants the answer's status."""
        if self._tracer is None:
            yield lambda status: None
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope).items()))
        about = {"http.request.method": scope["method"], "url.path": scope["path"], "labkit.request_id": request_id}
        name = f"{scope['method']} {scope['path'][:100]}"
        with self._tracer.start_as_current_span(name, parent, SpanKind.SERVER, about) as span:

            def answered(status: int | None) -> None:
                span.set_attribute("http.response.status_code", status or 0)
                if status is None or status >= 500:
                    span.set_status(StatusCode.ERROR)

            yield answered

    def answers(self, model: str, outputs: Sequence[RequestOutput]) -> None:
        """What the engine did for the request of this task, and when: its clock is its own, the last moment is now."""
        if self._tracer is None:
            return
        from opentelemetry import trace

        now = time.time_ns()
        span = trace.get_current_span()
        span.set_attribute("gen_ai.request.model", model)
        span.set_attribute("gen_ai.usage.input_tokens", sum(len(o.prompt_token_ids) for o in outputs))
        span.set_attribute("gen_ai.usage.output_tokens", sum(len(c.token_ids) for o in outputs for c in o.outputs))
        for output in outputs:
            times = output.metrics
            moments = (times.arrival_time, times.first_scheduled_time, times.first_token_time, times.finished_time)
            about: dict[str, str | int] = {
                "labkit.engine_request_id": output.request_id,
                "labkit.cached_tokens": output.num_cached_tokens,
            }
            for name, begin, end in zip(("queue", "prefill", "decode"), moments, moments[1:]):
                if begin is not None and end is not None and times.finished_time is not None:
                    ago = [now - int(1e9 * (times.finished_time - moment)) for moment in (begin, end)]
                    self._tracer.start_span(name, attributes=about, start_time=ago[0]).end(ago[1])

    def close(self) -> None:
        """Send what is left."""
        if self._tracer is not None:
            self._provider.shutdown()
