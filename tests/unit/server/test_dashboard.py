"""The dashboard's files, its events and its switches, with the fake engine."""

from __future__ import annotations

import json
import re
import threading

import httpx
import pytest

from labkit.engine.settings import Settings
from labkit.server import watch
from labkit.server.pages import FOLDER, PAGES
from tests.unit.server import fake_engine
from tests.unit.server.test_app import check_error, eventually

SETTINGS = "/dashboard/settings"


def events(reply):
    for line in reply.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


# ------------------------------------------------------------------------------------- files


def test_the_page_and_all_its_parts_are_open_and_typed(server):
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert set(PAGES) >= {"/dashboard", "/dashboard/main.js", "/dashboard/vendor/uPlot.esm.js"}
    for path in PAGES:
        reply = httpx.get(server.handle.url + path)
        want = types[path.rpartition(".")[2] if "." in path else "html"]
        assert reply.status_code == 200 and reply.headers["content-type"].partition(";")[0] == want
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_page_runs_only_its_own_files(server):
    reply = httpx.get(server.handle.url + "/dashboard")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bon[a-z]+=|\bstyle=", reply.text)


def test_everything_the_page_names_is_there():
    """What the HTML links to and what a module imports, by relative paths; nothing from elsewhere."""
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    for link in re.findall(r'<(?:link|script)[^>]*?(?:href|src)="([^"]+)"', html):
        assert f"/{link}" in PAGES
    for file in FOLDER.glob("*.js"):
        for name in re.findall(r'\bfrom "([^"]+)"', file.read_text(encoding="utf-8")):
            assert name.startswith("./") and (FOLDER / name).is_file(), f"{file.name} imports {name}"


def test_uplot_comes_with_its_licence():
    assert "MIT License" in (FOLDER / "vendor" / "uPlot.LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", ["/dashboard/", "/dashboard/../app.py", "/dashboard/vendor/uPlot.LICENSE"])
def test_no_other_file_is_there(server, path):
    assert server.http.get(path).status_code == 404


# ------------------------------------------------------------------------------------- events


def test_an_event_stands_for_itself(server):
    server.complete(max_tokens=5)
    with server.http.stream("GET", "/dashboard/events") as reply:
        one = next(events(reply))
    assert one["state"] == "running" and one["tokens_out"] == 5
    assert one["chat"] is True, "the model has a chat template"
    assert one["ttft"]["count"] == 1 and one["gap"]["count"] == 4 and one["gap"]["p50"] <= one["gap"]["p95"]
    assert one["settings"]["policy"] == "fcfs" and one["most"]["max_num_seqs"] == 256
    assert one["machine"]["gpu"] is None and one["machine"]["process"] == {"cpu_cores": None, "memory_bytes": None}


def test_without_a_chat_template_the_page_knows_that_it_cannot_chat(serve, monkeypatch):
    monkeypatch.setattr(fake_engine, "TEMPLATE", None)
    server = serve()
    with server.http.stream("GET", "/dashboard/events") as reply:
        assert next(events(reply))["chat"] is False
    assert server.chat().status_code == 400


def test_the_engine_is_looked_at_once_for_all_and_only_while_somebody_watches(server, monkeypatch):
    looks = []
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LOOKS", 0.05)
    take = server.core.picture
    monkeypatch.setattr(server.core, "picture", lambda: looks.append(1) or take())

    def watch_for(number: int) -> None:
        with server.http.stream("GET", "/dashboard/events") as reply:
            for _, _ in zip(range(number), events(reply)):
                pass

    threads = [threading.Thread(target=watch_for, args=(10,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 10 <= len(looks) <= 20, "not forty"
    seen = len(looks)
    threading.Event().wait(0.3)
    assert len(looks) <= seen + 1


def test_a_costly_look_is_rare(server, monkeypatch):
    """However long it takes, a look costs the engine at most one part in two hundred."""
    take = server.core.picture

    def slow():
        picture = take()
        picture.seconds = 0.005
        return picture

    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(server.core, "picture", slow)
    with server.http.stream("GET", "/dashboard/events") as reply:
        times = [one["picture"]["t"] for _, one in zip(range(3), events(reply))]
    assert times[2] - times[1] >= 0.99


def test_the_engine_ends_while_somebody_watches(server):
    assert server.http.post(SETTINGS, json={"policy": "priority"}).status_code == 200
    with server.http.stream("GET", "/dashboard/events") as reply:
        parts = events(reply)
        next(parts)
        server.process.die()
        last = list(parts)[-1]
    assert last["error"]["type"] in ("overloaded_error", "server_error")
    assert server.http.post(SETTINGS, json={"policy": "priority"}).status_code == 503
    assert eventually(lambda: server.http.get("/ready").status_code == 200), "it is started again"
    with server.http.stream("GET", "/dashboard/events") as reply:
        assert next(events(reply))["settings"]["policy"] == "fcfs", "as it was launched"


# ------------------------------------------------------------------------------------- switches


def test_switches(server):
    reply = server.http.post(SETTINGS, json={"policy": "priority", "max_num_seqs": 7})
    assert reply.status_code == 200 and reply.json()["settings"]["policy"] == "priority"
    assert reply.json()["settings"]["max_num_seqs"] == 7 and reply.json()["most"]["max_num_seqs"] == 256
    assert server.core.changes == [Settings(policy="priority", max_num_seqs=7)]
    reply = server.http.post(SETTINGS, json={})
    assert reply.json()["settings"]["enable_prefix_caching"] is True


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"policy": "best"}, "policy", "invalid_value"),
        ({"policy": 1}, "policy", "invalid_value"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching", "invalid_value"),
        ({"max_num_seqs": 0}, "max_num_seqs", "invalid_value"),
        ({"max_num_seqs": 257}, "max_num_seqs", "invalid_value"),
        ({"max_num_seqs": True}, "max_num_seqs", "invalid_value"),
        ({"max_num_batched_tokens": 10**30}, "max_num_batched_tokens", "invalid_value"),
        ({"block_size": 8}, "block_size", "unknown_parameter"),
    ],
)
def test_switches_that_cannot_be(serve, body, param, code):
    server = serve(engine={"max_num_batched_tokens": 512})
    error = check_error(server.http.post(SETTINGS, json=body), 400, "invalid_request_error", code)
    assert error["param"] == param
    assert server.core.changes == []


def test_switches_need_the_key(server):
    reply = httpx.post(server.handle.url + SETTINGS, json={"policy": "priority"})
    check_error(reply, 401, "authentication_error", "invalid_api_key")
    assert server.core.changes == []


def test_fewer_seats_count_for_the_queue(serve):
    """Whoever finds no seat waits, and --max-queue counts it."""
    server = serve(engine={"max_num_seqs": 8}, max_queue=1)
    assert server.http.post(SETTINGS, json={"max_num_seqs": 1}).status_code == 200
    server.core.gate.clear()
    threads = [threading.Thread(target=server.complete, kwargs={"max_tokens": 1}) for _ in range(2)]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        assert eventually(lambda number=number: len(server.core.requests) == number)
    assert eventually(lambda: server.complete(max_tokens=1).status_code == 503)
    server.core.gate.set()
    server.process.wake()
    for thread in threads:
        thread.join()
