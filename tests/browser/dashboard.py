"""What the tests of the dashboard share: a server with the toy, a page that watches it, and made-up events."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from labkit.config import EngineConfig
from labkit.engine.picture import Picture
from labkit.engine.stats import EngineStats
from labkit.server.config import ServerConfig
from labkit.server.serve import start

KEY = "a-key-of-these-tests"


class Served:
    """The server, and clients that load it."""

    def __init__(self, trace: Path):
        self.trace = trace
        engine = EngineConfig(device="cpu", num_kv_blocks=48, max_num_seqs=6, max_num_batched_tokens=128)
        self.handle = start("toy", engine, ServerConfig(port=0, api_keys=(KEY,), trace=str(trace)))
        self.url = self.handle.url + "/dashboard"

    def events(self) -> list[dict[str, Any]]:
        """Of the trace, as far as it is written."""
        lines = self.trace.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def load(self, clients: int, until: threading.Event, **fields: Any) -> list[threading.Thread]:
        def ask() -> None:
            with httpx.Client(base_url=self.handle.url, headers={"authorization": f"Bearer {KEY}"}) as http:
                while not until.is_set():
                    http.post("/v1/completions", json={"ignore_eos": True, **fields}, timeout=60)
                    until.wait(0.02)

        threads = [threading.Thread(target=ask) for _ in range(clients)]
        for thread in threads:
            thread.start()
        return threads


def wait_for(page: Any, condition: str) -> None:
    """Until a JavaScript expression holds. Asked from here: the page's policy forbids eval."""
    end = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not in 30 s: {condition}"
        time.sleep(0.05)


def numbers(page: Any) -> dict[str, str]:
    """What each tile says, unit and all."""
    tiles = "[...document.querySelectorAll('.tile')]"
    return dict(page.evaluate(f"{tiles}.map(tile => [tile.dataset.tile, tile.children[1].innerText])"))


def made_up(**fields: Any) -> dict[str, Any]:
    """An event as the server sends it."""
    settings = {"policy": "fcfs", "enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return {
        **dataclasses.asdict(EngineStats(kv_blocks_total=3, kv_blocks_free=3)),
        "model": "<b>made up</b>",
        "time": 1e9,
        "state": "running",
        "chat": True,
        "block_size": 16,
        "speculative": False,
        "ttft": None,
        "gap": None,
        "settings": settings,
        "most": settings,
        "machine": None,
        "picture": msgspec.to_builtins(Picture(1.0, [], 1, bytes(3), bytes(3), [], [])),
        **fields,
    }


def feed(page: Any, served: Served, *events: dict[str, Any]) -> None:
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.route("**/dashboard/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.goto(served.url)
    page.fill("#key", "any")
    page.keyboard.press("Enter")
    page.wait_for_selector("#live:not([hidden])")
    wait_for(page, "document.querySelector('#model').textContent !== ''")
