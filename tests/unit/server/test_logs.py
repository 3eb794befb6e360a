"""Log lines: each with the id of its request."""

import io
import json
import logging

import pytest

from labkit.server import logs
from labkit.server.config import ServerConfig
from tests.unit.server.test_app import eventually


@pytest.fixture
def lines(monkeypatch):
    """lines("json") sends the log there; what it gives reads the lines so far.

    Only labkit's own: in this process are also the client, other tests' threads, and whatever the collector of garbage
    finds of theirs.
    """
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()

    def begin(log_format):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            logs.set_up("info", log_format)
        (handler,) = root.handlers
        handler.addFilter(logging.Filter("labkit"))
        return lambda: stream.getvalue().splitlines()

    yield begin
    root.handlers[:] = before
    root.setLevel(level)


def test_json(server, lines):
    read = lines("json")
    server.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert eventually(read)
    entry = json.loads(read()[0])
    assert entry["request_id"] == "mine" and entry["level"] == "INFO" and entry["logger"] == "labkit.server"
    assert (entry["method"], entry["path"], entry["status"]) == ("GET", "/v1/models", 200)
    assert entry["ms"] >= 0 and entry["time"] and entry["message"].startswith('GET "/v1/models" 200')


def test_text(server, lines):
    read = lines("text")
    server.http.get("/nowhere%0A", headers={"x-request-id": "mine"})
    assert eventually(read)
    assert len(read()) == 1, "a path cannot forge a line"
    assert read()[0].split(" INFO ")[1].startswith('mine GET "/nowhere')


@pytest.mark.parametrize("stream", [False, True])
def test_the_reason_of_a_failed_step_is_in_the_log_with_its_request(server, lines, stream):
    read = lines("json")
    server.core.error = "RuntimeError: out of memory"
    server.http.post("/v1/completions", json={"prompt": "x", "stream": stream}, headers={"x-request-id": "mine"})
    failed = next(entry for entry in map(json.loads, read()) if entry["level"] == "ERROR")
    assert failed["request_id"] == "mine" and "out of memory" in failed["message"]


def test_a_fault_of_the_server_is_one_line_with_its_traceback(server, lines, monkeypatch):
    read = lines("json")
    logging.getLogger("asyncio").error("Task exception was never retrieved: Traceback of another test")
    monkeypatch.setattr("labkit.server.completions.usage", lambda outputs: 1 / 0)
    server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine"})
    assert eventually(lambda: "Traceback" in "".join(read()))
    failed = next(entry for entry in map(json.loads, read()) if entry["level"] == "ERROR")
    assert failed["request_id"] == "mine" and "ZeroDivisionError" in failed["exc_info"]


def test_lines_without_a_request(lines):
    read = lines("text")
    logging.getLogger("labkit.server").warning("hello")
    assert read()[0].endswith(" WARNING - hello")


def test_the_format_is_checked():
    with pytest.raises(ValueError, match="log_format"):
        ServerConfig(log_format="xml")
