"""The server around the answers: access, errors, load, ends."""

import concurrent.futures
import json
import socket
import threading
import time

import httpx
import pytest

from labkit.server import service
from tests.unit.server.conftest import KEY

TEXT = "/v1/completions"


def eventually(what, seconds=5.0):
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


def check_error(reply, status, type, code):
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (reply.status_code, error["type"], error["code"]) == (status, type, code)
    return error


# ------------------------------------------------------------------------------------- access


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/dashboard", "/docs", "/openapi.json"])
def test_open_paths(server, path):
    assert httpx.get(server.handle.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/dashboard/events", "/nowhere", "/health/", "//health"])
def test_all_other_paths_need_a_key(server, path):
    check_error(httpx.get(server.handle.url + path), 401, "authentication_error", "invalid_api_key")


def test_the_key_comes_before_the_body(server):
    with socket.create_connection(("127.0.0.1", int(server.handle.url.rsplit(":")[-1]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


def test_paths_and_methods(server):
    check_error(server.http.get("/nowhere"), 404, "invalid_request_error", "not_found")
    reply = server.http.get(TEXT)
    check_error(reply, 405, "invalid_request_error", "method_not_allowed")
    assert reply.headers["allow"] == "POST"


def test_request_ids(server):
    for given, back in (("abc", "abc"), ("x" * 300, "x" * 200), ("a b~", "a b~")):
        assert server.http.get("/health", headers={"x-request-id": given}).headers["x-request-id"] == back
    raw = server.http.get("/health", headers={"x-request-id": "caf\u00e9".encode("latin-1")})
    assert raw.headers["x-request-id"] == "caf"
    assert len({server.http.get("/health").headers["x-request-id"] for _ in range(3)}) == 3
    reply = httpx.get(server.handle.url + "/v1/models", headers={"x-request-id": "mine"})
    assert reply.status_code == 401 and reply.headers["x-request-id"] == "mine"


def test_equal_request_ids_do_not_disturb_one_another(server):
    headers = {"x-request-id": "abc"}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ask = [{"prompt": "p" * n, "max_tokens": 9} for n in (1, 2, 3)]
        replies = list(pool.map(lambda body: server.http.post(TEXT, json=body, headers=headers), ask))
    assert [r.json()["choices"][0]["text"] for r in replies] == ["bcdefghij", "cdefghijk", "defghijkl"]
    assert {r.headers["x-request-id"] for r in replies} == {"abc"}


def test_cors(serve):
    server = serve(cors_origins=("http://app.example",))
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    url = server.handle.url + TEXT
    reply = httpx.options(url, headers={"origin": "http://app.example", **preflight})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "http://app.example"
    reply = httpx.options(url, headers={"origin": "http://other.example", **preflight})
    assert "access-control-allow-origin" not in reply.headers
    reply = httpx.post(url, headers={"origin": "http://app.example"}, json={})
    assert reply.status_code == 401 and reply.headers["access-control-allow-origin"] == "http://app.example"


def test_no_cors_unless_asked_for(server):
    reply = server.http.get("/health", headers={"origin": "http://app.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]


# ------------------------------------------------------------------------------------- bodies


def test_bodies_that_are_not_taken(serve):
    server = serve(max_body_bytes=1000)
    body = json.dumps({"prompt": "x" * 1000}).encode()
    headers = {"content-type": "application/json"}
    check_error(server.http.post(TEXT, content=body, headers=headers), 413, "invalid_request_error", "body_too_large")
    pieces = server.http.post(TEXT, content=iter([body[:600], body[600:]]), headers=headers)  # its length is not told
    check_error(pieces, 413, "invalid_request_error", "body_too_large")
    assert server.http.post(TEXT, content=b"{}", headers={"content-type": "text/html"}).status_code == 415
    assert server.http.post(TEXT, content=b"{}", headers={**headers, "content-encoding": "gzip"}).status_code == 415


def test_a_body_of_exactly_the_limit(serve):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    server = serve(max_body_bytes=len(body))
    assert server.http.post(TEXT, content=body, headers={"content-type": "application/json"}).status_code == 200


def test_tokens(server):
    text = "naïve 日本 🙂"
    tokens = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == len(text.encode())
    assert tokens["max_model_len"] == 64
    assert server.http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] == server.chat(max_tokens=1).json()["usage"]["prompt_tokens"]
    for bad in ({"tokens": [-1]}, {"tokens": [257]}, {"tokens": ["a"]}, {}):
        check_error(server.http.post("/detokenize", json=bad), 400, "invalid_request_error", "invalid_value")
    for bad in ({}, {"prompt": 1}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        check_error(server.http.post("/tokenize", json=bad), 400, "invalid_request_error", "invalid_value")


def test_models(serve):
    server = serve(served_model_name="org/name")
    assert [m["id"] for m in server.http.get("/v1/models").json()["data"]] == ["org/name"]
    assert server.http.get("/v1/models/org/name").json()["object"] == "model"
    check_error(server.http.get("/v1/models/fake"), 404, "invalid_request_error", "model_not_found")
    check_error(server.complete(model="fake"), 404, "invalid_request_error", "model_not_found")
    assert server.complete(model="org/name", max_tokens=1).json()["model"] == "org/name"


# ------------------------------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cors", [(), ("*",)])
def test_a_client_that_goes_away_ends_its_request(serve, stream, cors):
    server = serve(cors_origins=cors)
    server.core.gate.clear()
    body = json.dumps({"prompt": ["a", "b"], "max_tokens": 50, "stream": stream}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.handle.url.rsplit(":")[-1]))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert eventually(lambda: len(server.core.requests) == 2)
        assert server.core.cancelled == []
    assert eventually(lambda: len(server.core.cancelled) == 2)
    assert eventually(lambda: 'labkit_requests_total{finish_reason="abort"} 2.0' in server.http.get("/metrics").text)
    assert f'labkit_http_requests_total{{path="{TEXT}",status="499"}} 1.0' in server.http.get("/metrics").text


def test_a_request_leaves_no_task(server):
    def tasks():
        (line,) = [x for x in server.http.get("/metrics").text.splitlines() if x.startswith("labkit_asyncio_tasks ")]
        return float(line.split()[1])

    before = tasks()
    server.core.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, max_tokens=1)
        assert eventually(lambda: len(server.core.requests) == 1)
        assert tasks() > before
        server.core.gate.set()
        server.process.wake()
        assert answer.result().status_code == 200
    with server.http.stream("POST", TEXT, json={"prompt": "a", "max_tokens": 60, "stream": True}) as reply:
        next(reply.iter_raw())
    assert eventually(lambda: tasks() == before)


def test_a_stream_that_is_closed_in_the_middle_ends_its_request(server):
    with server.http.stream("POST", TEXT, json={"prompt": "a", "max_tokens": 60, "stream": True}) as reply:
        next(reply.iter_raw())
        server.core.gate.clear()
    assert eventually(lambda: server.core.cancelled == ["r1"])


# ------------------------------------------------------------------------------------- load


def test_a_full_queue(serve):
    server = serve(engine={"max_num_seqs": 1}, max_queue=1)
    server.core.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        taken = [pool.submit(server.complete, max_tokens=1)]  # runs
        assert eventually(lambda: len(server.core.requests) == 1)
        taken.append(pool.submit(server.complete, max_tokens=1))  # waits
        assert eventually(lambda: "labkit_num_requests_waiting 1.0" in server.http.get("/metrics").text)
        reply = server.complete(max_tokens=1)
        check_error(reply, 503, "overloaded_error", "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        server.core.gate.set()
        server.http.get("/health")
        server.process.wake()
        assert [future.result().status_code for future in taken] == [200, 200]


def test_many_at_once_find_a_place_while_there_is_one(serve):
    """None of them waits for a place, though none is known to run yet."""
    server = serve(engine={"max_num_seqs": 16}, max_queue=1)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: server.complete(max_tokens=5), range(16)))
    assert [reply.status_code for reply in replies] == [200] * 16


def test_the_rate_of_a_key(serve):
    server = serve(rate_limit=0.001, rate_burst=2, api_keys=(KEY, "another-key"))
    assert [server.complete(max_tokens=1).status_code for _ in range(3)] == [200, 200, 429]
    reply = server.chat(max_tokens=1)
    check_error(reply, 429, "rate_limit_error", "rate_limit_exceeded")
    assert int(reply.headers["retry-after"]) > 100
    other = {"authorization": "Bearer another-key"}
    assert server.http.post(TEXT, json={"prompt": "x", "max_tokens": 1}, headers=other).status_code == 200
    assert server.http.get("/v1/models").status_code == 200


def test_a_timeout(serve):
    server = serve(request_timeout=0.3)
    server.core.gate.clear()
    for stream in (False, True):  # nothing was sent yet: an answer of its own
        check_error(server.complete(stream=stream), 504, "timeout_error", "timeout")
    assert eventually(lambda: server.core.cancelled == ["r1", "r2"])


def test_a_timeout_in_a_stream(serve):
    server = serve(request_timeout=0.5)
    with server.http.stream("POST", TEXT, json={"prompt": "a", "max_tokens": 60, "stream": True}) as reply:
        parts = reply.iter_text()
        text = next(parts)
        server.core.gate.clear()
        text += "".join(parts)
    if "[DONE]" not in text:
        last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "timeout" and eventually(lambda: server.core.cancelled == ["r1"])
    else:
        pytest.skip("the engine was faster than this test")


# ------------------------------------------------------------------------------------- faults and ends


def test_a_failed_step(server):
    server.core.error = "RuntimeError: secret"
    reply = server.complete()
    error = check_error(reply, 500, "server_error", "internal_error")
    assert "secret" not in error["message"]
    assert server.complete(max_tokens=1).status_code == 200, "the next one is served"


def test_a_failed_step_in_a_stream(server):
    with server.http.stream("POST", TEXT, json={"prompt": "a", "max_tokens": 60, "stream": True}) as reply:
        parts = reply.iter_text()
        text = next(parts)
        server.core.error = "RuntimeError: secret"
        text += "".join(parts)
    assert json.loads(text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "[DONE]" not in text and "secret" not in text


def test_a_fault_of_the_server_itself(server, monkeypatch):
    monkeypatch.setattr("labkit.server.completions.usage", lambda outputs: 1 / 0)
    error = check_error(server.complete(max_tokens=1), 500, "server_error", "internal_error")
    assert "division" not in error["message"]
    text = server.complete(max_tokens=1, stream=True, stream_options={"include_usage": True}).text
    assert '"internal_error"' in text and "division" not in text


def test_metrics(server):
    server.complete(max_tokens=5)
    for path in ("/made-up", "/v1/models/made-up"):
        server.http.get(path)
    text = server.http.get("/metrics").text
    assert f'labkit_http_requests_total{{path="{TEXT}",status="200"}} 1.0' in text
    assert 'labkit_http_requests_total{path="other",status="404"} 1.0' in text
    assert "made-up" not in text
    assert "labkit_generation_tokens_total 5.0" in text


def test_dashboard_events_end_with_the_server(serve):
    server = serve()
    with server.http.stream("GET", "/dashboard/events") as reply:
        parts = reply.iter_text()
        assert json.loads(next(parts).removeprefix("data: "))["running"] == 0
        begin = time.monotonic()
        stopping = threading.Thread(target=server.handle.stop)
        stopping.start()
        for _ in parts:
            pass
        stopping.join()
        assert time.monotonic() - begin < 2


def test_stop_frees_the_port_at_once(serve):
    first = serve()
    assert first.complete(max_tokens=1).status_code == 200  # leaves a connection open
    first.handle.stop()
    first.handle.stop()
    second = serve(port=int(first.handle.url.rsplit(":")[-1]))
    assert second.handle.url == first.handle.url and second.complete(max_tokens=1).status_code == 200


def test_draining(serve):
    server = serve(drain_seconds=20)
    server.core.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        last = pool.submit(server.complete, max_tokens=2)
        assert eventually(lambda: len(server.core.requests) == 1)
        server.handle.drain()
        assert eventually(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/health").status_code == 200
        reply = server.complete()
        check_error(reply, 503, "overloaded_error", "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        server.core.gate.set()
        server.process.wake()
        assert last.result(5).status_code == 200
    server.handle.join(5)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.handle.url + "/health")


def test_what_does_not_finish_is_ended_after_drain_seconds(serve):
    server = serve(drain_seconds=0.2)
    server.core.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        last = pool.submit(server.complete)
        assert eventually(lambda: len(server.core.requests) == 1)
        server.handle.drain()
        check_error(last.result(5), 503, "overloaded_error", "overloaded")
    server.handle.join(5)


def test_long_texts_of_tokenize_leave_threads_to_others(server, monkeypatch):
    at_once, most, gate = [], [], threading.Event()

    def slow(self, wish):
        at_once.append(wish)
        most.append(len(at_once))
        gate.wait(10)
        at_once.pop()
        return {}

    monkeypatch.setattr(service.Service, "tokenize", slow)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.http.post, "/tokenize", json={"prompt": "a"}) for _ in range(8)]
        assert eventually(lambda: len(at_once) == service.MOST_TOKENIZED)
        assert server.complete(max_tokens=1).status_code == 200
        gate.set()
        assert {answer.result().status_code for answer in answers} == {200}
    assert max(most) == service.MOST_TOKENIZED and len(most) == 8
