"""Clients that are slow, silent or endless."""

import socket
import time

import pytest

from labkit.server import app, connection, stream
from tests.unit.server.raw import connect, head, post, read_all, read_until
from tests.unit.server.test_app import check_error, eventually

TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 60, "stream": True, "logprobs": 20, "n": 30}  # 900 KB of events


def is_closed_within(seconds, client):
    client.settimeout(seconds)
    try:
        return read_all(client) is not None
    except TimeoutError:
        return False


def test_a_header_that_drips(server, monkeypatch):
    monkeypatch.setattr(connection, "SECONDS_FOR_HEAD", 0.4)
    with connect(server.handle.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(5):  # what comes does not make it wait longer
            time.sleep(0.05)
            client.sendall(b"X: y\r\n")
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"timeout_error"' in answer
    length = int(answer.partition(b"content-length: ")[2].split()[0])
    assert len(answer.partition(b"\r\n\r\n")[2]) == length


def test_the_second_header_may_not_drip_either(server, monkeypatch):
    monkeypatch.setattr(connection, "SECONDS_FOR_HEAD", 0.4)
    with connect(server.handle.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(client, b"}").startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /hea")
        assert b"HTTP/1.1 408 " in read_all(client)


def test_a_connection_without_a_request(server, monkeypatch):
    monkeypatch.setattr(connection, "SECONDS_FOR_HEAD", 0.2)
    with connect(server.handle.url) as client:
        assert is_closed_within(5, client)


def test_an_idle_connection_is_closed(serve, monkeypatch):
    monkeypatch.setattr("labkit.server.serve.SECONDS_IDLE", 0.2)
    server = serve()
    with connect(server.handle.url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert is_closed_within(5, client)


def test_a_header_without_end(server):
    with connect(server.handle.url) as client:
        try:
            client.sendall(b"GET /health HTTP/1.1\r\nX: " + b"z" * 200_000)
        except OSError:
            return
        assert read_all(client)[:13] in (b"HTTP/1.1 400 ", b"")


@pytest.mark.parametrize(("length", "status"), [(60_000, b"200"), (66_000, b"400")])
@pytest.mark.parametrize("request_line", [b"GET /health?%s HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nX: %s\r\n"])
def test_a_header_that_comes_whole(server, request_line, length, status):
    with connect(server.handle.url) as client:
        client.sendall(request_line % (b"z" * length) + b"Host: x\r\nConnection: close\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 %s " % status)
    assert server.http.get("/health").status_code == 200


def test_a_body_that_drips(server, monkeypatch):
    monkeypatch.setattr(app, "SECONDS_FOR_BODY", 0.3)
    with connect(server.handle.url) as client:
        client.sendall(head(TEXT, 100) + b'{"prompt"')
        answer = read_until(client, b'"timeout_error"')
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_body_counts_for_the_request_timeout(serve):
    server = serve(request_timeout=0.3)
    with connect(server.handle.url) as client:
        client.sendall(head(TEXT, 100) + b'{"prompt"')
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 504 ")


def test_a_body_that_nobody_reads_ends_some_time(server, monkeypatch):
    """Though more of it comes all the time."""
    monkeypatch.setattr(connection, "SECONDS_FOR_HEAD", 0.3)
    with connect(server.handle.url) as client:
        client.sendall(head("/nowhere", 10**9))
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 404 ")
        end = time.monotonic() + 4
        with pytest.raises(OSError):
            while time.monotonic() < end:
                client.sendall(b"x")
                time.sleep(0.02)


def test_a_refused_body_does_not_harm_the_next_request(server):
    with connect(server.handle.url) as client:
        client.sendall(head(TEXT, 200_000, "X-Request-Id: one").replace(b"Bearer ", b"Bearer not-"))
        assert read_until(client, b"}}").startswith(b"HTTP/1.1 401 ")
        client.sendall(b"x" * 200_000 + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(client, b"}").startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def small_buffers(server, monkeypatch):
    """The system keeps a few megabytes for a reader, too much for a test."""
    server.handle._server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    monkeypatch.setattr(stream, "MOST_UNSENT", 20_000)


def test_a_slow_reader_is_dropped_and_holds_up_nobody(server, small_buffers):
    with connect(server.handle.url, receive_buffer=4096) as client:
        server.core.seconds = 0.05
        client.sendall(post(TEXT, **LONG))
        assert eventually(lambda: server.core.requests)
        assert eventually(lambda: server.core.cancelled, 20), "its request is cancelled"
        assert server.complete(max_tokens=1).status_code == 200
        assert set(server.core.cancelled) == {"r1"}
        answer = read_all(client)
    assert b"reads too slowly" in answer[-400:] and b"[DONE]" not in answer
    assert eventually(lambda: 'finish_reason="abort"} 0.0' not in server.http.get("/metrics").text)


def test_a_slow_reader_that_never_reads_loses_its_connection(server, small_buffers, monkeypatch):
    monkeypatch.setattr(connection, "SECONDS_STALLED", 0.2)
    with connect(server.handle.url, receive_buffer=4096) as client:
        server.core.seconds = 0.05
        client.sendall(post(TEXT, **LONG))
        assert eventually(lambda: server.core.cancelled, 20)
        time.sleep(1)
        assert b"reads too slowly" not in read_all(client), "what was left for it is gone"


PIPELINED = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_second_request_waits_for_the_answer_to_the_first(server):
    with connect(server.handle.url) as client:
        client.sendall(post(TEXT, prompt="a", max_tokens=50) + PIPELINED)
        answers = read_until(client, b'"ok"')
    assert answers.count(b"HTTP/1.1 200 ") == 2 and answers.index(b"text_completion") < answers.index(b'"ok"')


def test_a_client_that_goes_ends_its_first_request_too(server):
    server.core.seconds = 0.05
    with connect(server.handle.url) as client:
        client.sendall(post(TEXT, prompt="a", max_tokens=60, stream=True) + PIPELINED)
        read_until(client, b"data: ")
    assert eventually(lambda: server.core.cancelled == ["r1"])


def test_no_event_waits_for_an_acknowledgement(server, monkeypatch):
    """Small writes go out at once: Nagle's algorithm is off on every connection that is accepted."""
    no_delay = []
    made = connection.Connection.connection_made

    def noticed(self, transport):
        no_delay.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(connection.Connection, "connection_made", noticed)
    assert server.http.get("/health").status_code == 200
    assert no_delay and all(no_delay)


def test_an_error_of_the_body_has_the_shape(serve):
    server = serve(max_body_bytes=1000)
    reply = server.http.post(TEXT, content=b"x" * 2000, headers={"content-type": "application/json"})
    check_error(reply, 413, "invalid_request_error", "body_too_large")
