"""`browser_page`: a fresh page in the system's Chromium, for tests marked `browser`. `jupyterlab`: the address of a
JupyterLab on notebooks/, started as `make lab` starts it. `served`: a server with the toy. `page`: its
dashboard, with the key given.

Playwright's own download of a browser is not used: the system's Chromium (or Chrome) is, from CHROMIUM or the PATH.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.dashboard import KEY, Served, wait_for

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    # A browser that phones home fails slowly, and noisily, on a machine without a network.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A container's /dev/shm is often 64 MB, too small for a page.
    "--disable-dev-shm-usage",
]


def find_chromium() -> str | None:
    if named := os.environ.get("CHROMIUM"):
        return named
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or next((place for place in PLACES if Path(place).exists()), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = find_chromium()
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must run the browser tests, and there is no Chromium here")
        pytest.skip("needs Chromium or Chrome (CHROMIUM=/path/to/it if it lies somewhere else)")
    from playwright.sync_api import sync_playwright

    # Chromium's own sandbox refuses to start as root.
    flags = [*FLAGS, "--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else FLAGS
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, headless=True, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def browser_page(browser: Any) -> Iterator[Any]:
    """A page with `page.errors`: what its console and its scripts complained of, for tests to look at."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.errors = []
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.set_default_timeout(30_000)
    yield page
    context.close()


@pytest.fixture(scope="session")
def jupyterlab(browser: Any) -> Iterator[str]:
    """Depends on `browser`, so that without a Chromium no server is started."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve().parents[2] / "scripts" / "lab.py")],
        env=os.environ | {"PORT": str(port), "BROWSER": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:  # ends when the server does
            if "ready: " in line:
                address = line.partition("ready: ")[2].strip()
                # Without the lesson that it opens, and without what the last run left open.
                yield re.sub(r"/lab/tree/[^?]+", "/lab", address) + "&reset"
                break
        else:
            pytest.fail("JupyterLab did not start")
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.fixture(scope="session")
def served(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    one = Served(tmp_path_factory.mktemp("dashboard") / "trace.jsonl")
    yield one
    one.handle.stop()


@pytest.fixture
def page(browser_page: Any, served: Served) -> Iterator[Any]:
    """Connected, and at the end without a complaint in the console; a blocked script or style would be one."""
    browser_page.goto(served.url)
    browser_page.fill("#key", KEY)
    browser_page.keyboard.press("Enter")
    browser_page.wait_for_selector("#live:not([hidden])")
    wait_for(browser_page, "document.querySelector('[data-tile=cpu] .number').textContent.match(/\\d/)")
    yield browser_page
    assert browser_page.errors == []
