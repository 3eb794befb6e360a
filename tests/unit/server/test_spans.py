"""Spans, as an OpenTelemetry collector gets them."""

import gzip
import http.server
import threading

import pytest

from labkit.errors import LabkitError
from labkit.server.config import ServerConfig
from labkit.server.spans import Spans


class Collector:
    """Takes OTLP over HTTP and keeps the spans by name."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        collector, self.spans, self.services = self, [], set()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.services.add(attributes(group.resource)["service.name"])
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def attributes(span):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture
def collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="labkit[otel] is not installed")
    one = Collector()
    yield one
    one.server.shutdown()
    one.server.server_close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_what_the_engine_did(serve, collector, stream):
    server = serve(otlp_endpoint=collector.url)
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-request-id": "mine"}
    server.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3, "stream": stream}, headers=parent)
    server.handle.stop()  # sends what is left
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode"} and collector.services == {"labkit"}
    request = spans["POST /v1/completions"]
    assert request.trace_id.hex() == "ab" * 16 and request.parent_span_id.hex() == "cd" * 8
    about = attributes(request)
    assert about["labkit.request_id"] == "mine" and about["http.response.status_code"] == 200
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (5, 3)
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent_span_id == request.span_id and attributes(spans[name])["labkit.engine_request_id"]
    decode = spans["decode"]
    assert decode.end_time_unix_nano - decode.start_time_unix_nano == pytest.approx(1e9, rel=1e-3), "as the fake says"


def test_a_failure_is_marked(serve, collector):
    server = serve(otlp_endpoint=collector.url)
    server.core.error = "RuntimeError"
    server.complete()
    server.handle.stop()
    (span,) = collector.spans
    assert span.status.code == 2 and attributes(span)["http.response.status_code"] == 500


def test_a_collector_that_is_not_there_does_no_harm(serve):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="labkit[otel] is not installed")
    server = serve(otlp_endpoint="http://127.0.0.1:9")
    assert server.complete(max_tokens=1).status_code == 200


def test_opentelemetry_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(LabkitError, match=r"pip install 'labkit\[otel\]'"):
        Spans("http://127.0.0.1:4318")


def test_the_endpoint_is_a_url():
    with pytest.raises(ValueError, match="otlp_endpoint"):
        ServerConfig(otlp_endpoint="localhost:4318")
