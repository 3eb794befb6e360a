"""That a browser test can do here what the others need: load, click, use the keyboard, read the console."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>smoke</title><link rel="icon" href="data:,">
<button onclick="document.querySelector('output').textContent = 'clicked'">Click</button>
<label>Step <input type="range" min="0" max="9" value="0"
  oninput="document.querySelector('output').textContent = this.value"></label>
<output></output></html>"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "index.html").write_text(PAGE, encoding="utf-8")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_click_and_keyboard(browser_page: Any, site: str) -> None:
    browser_page.goto(site)
    output = browser_page.locator("output")
    browser_page.get_by_role("button", name="Click").click()
    assert output.text_content() == "clicked"

    slider = browser_page.get_by_role("slider")
    slider.focus()
    for _ in range(3):
        slider.press("ArrowRight")
    assert output.text_content() == "3"
    assert browser_page.errors == []


def test_console_errors_are_seen(browser_page: Any, site: str) -> None:
    browser_page.goto(site)
    browser_page.evaluate("console.error('something broke')")
    browser_page.evaluate("setTimeout(() => { throw new Error('thrown') }, 0)")
    browser_page.wait_for_timeout(200)
    assert "something broke" in browser_page.errors
    assert any("thrown" in error for error in browser_page.errors)
