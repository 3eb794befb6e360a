"""Requests that schemathesis makes up from the server's own description: no fault, no hang."""

from __future__ import annotations

import importlib
import os
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.integration.test_openai_client import Served, serving

if os.environ.get("CI") == "true":
    schemathesis = importlib.import_module("schemathesis")
else:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (labkit[test])")

SECONDS = 20
# A full queue, a timeout and a path that is not there are answers too. A 500 never is.
ALLOWED = {200, 400, 404, 405, 408, 413, 415, 503, 504}
OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models/{model_id}", "GET"),
    ("/metrics", "GET"),
]
made_up = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Answers are short here, so that whatever is asked for is soon over."""
    with serving(tmp_path_factory.mktemp("fuzz"), "--max-model-len", "48", "--request-timeout", "10") as served:
        yield served
        assert served.http.get("/health").status_code == 200
        end = time.monotonic() + 20
        while served.running() and time.monotonic() < end:
            time.sleep(0.1)
        assert served.running() == 0
        assert "Traceback" not in served.output()


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path,method", OPERATIONS)
def test_every_made_up_request_is_answered(small: Served, path, method, mode):
    """As the description says (POSITIVE), and as it does not."""
    description = small.http.get("/openapi.json").json()
    description["paths"][path][method.lower()]["security"] = []  # or half of the wrong ones had only the wrong key
    operation = schemathesis.openapi.from_dict(description)[path][method]
    if mode == "NEGATIVE" and method == "GET":
        pytest.skip("nothing there can be wrong")
    answered = []

    @made_up
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
    def ask(case):
        key = {"authorization": small.http.headers["authorization"]}
        reply = case.call(base_url=small.url, timeout=SECONDS, headers=key)
        assert reply.status_code in ALLOWED, f"{reply.status_code}: {reply.text[:500]}"
        if reply.status_code != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        answered.append(reply.status_code)

    ask()
    assert len(answered) >= 5 or method == "GET"


def test_what_is_made_up_is_all_that_there_is(small: Served):
    description = httpx.get(f"{small.url}/openapi.json").json()
    there = {(path, method.upper()) for path, item in description["paths"].items() for method in item}
    without_input = {
        (p, "GET") for p in ("/health", "/ready", "/version", "/dashboard", "/v1/models", "/dashboard/events")
    }
    assert set(OPERATIONS) == there - without_input
