"""Every lesson in a real JupyterLab in Chromium: run all, no error anywhere, its sliders move by keyboard."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 300  # for all cells of a lesson, on a machine that is busy
HARMLESS = "ResizeObserver loop"  # the browser's own note that a layout took two rounds
BLANK = '<svg xmlns="http://www.w3.org/2000/svg"/>'


SETTINGS = {
    # Every cell is in the page, not only those in view.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def copy_without_outputs(folder: Path) -> None:
    folder.mkdir()
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / path.name)


class Server:
    """JupyterLab over a copy of the notebooks, so that what it saves harms nothing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.token = secrets.token_hex(16)
        self.log = folder / "jupyter.log"
        copy_without_outputs(folder / "notebooks")
        for name, settings in SETTINGS.items():
            path = folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))
        state = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
        own = {
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "IPYTHONDIR": str(folder / "ipython"),
            "JUPYTER_TOKEN": self.token,
            "JUPYTER_PREFER_ENV_PATH": "1",
            "LABKIT_LAB_FOLDER": str(folder / "points"),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        command = [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--log-level=WARN", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder / 'notebooks'}"),
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | state | own, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.url = self._wait(folder / "runtime")

    def _wait(self, runtime: Path) -> str:
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            for path in runtime.glob("jpserver-*.json"):
                try:
                    url = str(json.loads(path.read_text())["url"])
                    urllib.request.urlopen(f"{url}api/status?token={self.token}", timeout=5).close()
                    return url
                except (ValueError, urllib.error.URLError, OSError):
                    pass
            time.sleep(0.3)
        raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()}")

    def address(self, notebook: str) -> str:
        return f"{self.url}lab/tree/{notebook}?token={self.token}&reset"

    def stop_kernels(self) -> None:
        headers = {"Authorization": f"token {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}api/sessions", headers=headers)) as answer:
            sessions = json.load(answer)
        for session in sessions:
            request = urllib.request.Request(
                f"{self.url}api/sessions/{session['id']}", headers=headers, method="DELETE"
            )
            urllib.request.urlopen(request).close()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("jupyter"))
    yield server
    server.stop()


def stay_local(page: Any) -> None:
    """Answer for the rest of the world (the Colab badge), so that the test needs no network."""

    def answer(route: Any) -> None:
        if route.request.url.startswith(("http://127.0.0.1", "data:", "blob:")):
            route.continue_()
        else:
            route.fulfill(content_type="image/svg+xml", body=BLANK)

    page.route("**/*", answer)


def open_lesson(page: Any, server: Server, path: Path) -> None:
    page.goto(server.address(path.name))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    # Cells that are run before the kernel has answered are dropped without a word.
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)


def run_all(page: Any) -> None:
    numbered = "[...document.querySelectorAll('.jp-InputPrompt')].some(p => /\\[[*\\d]+\\]/.test(p.textContent))"
    for _ in range(3):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_timeout(3000)
        if page.evaluate(numbered):
            break
    page.wait_for_function(
        "() => [...document.querySelectorAll('.jp-OutputArea-output')].some(o => o.textContent.includes('was reached')"
        " || o.dataset.mimeType === 'application/vnd.jupyter.error')",
        timeout=SECONDS * 1000,
    )


def complaints(page: Any) -> list[str]:
    return [text for text in page.errors if HARMLESS not in text]


def move_sliders(page: Any) -> None:
    """Each slider by one step with the arrow key; its picture and the words beside it follow."""
    sliders = page.get_by_role("slider")
    assert sliders.count() >= 1
    for number in range(sliders.count()):
        slider = sliders.nth(number)
        slider.scroll_into_view_if_needed()
        picture = slider.locator("xpath=ancestor::*[contains(@class, 'widget-vbox')]").locator("svg[role=img]")
        before, words = picture.inner_html(), picture.get_attribute("aria-label")
        slider.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "([number, words]) => document.querySelectorAll('.widget-vbox svg[role=img]')[number]"
            ".getAttribute('aria-label') !== words",
            arg=[number, words],
        )
        assert picture.inner_html() != before


def load_again_without_the_kernel(page: Any, server: Server, path: Path) -> None:
    """A picture stands where the widgets were, and no error."""
    widgets = page.get_by_role("slider").count()
    page.keyboard.press("Control+s")
    saved = server.folder / "notebooks" / path.name
    until = time.monotonic() + 30
    while "jupyter.widget-view" not in saved.read_text(encoding="utf-8"):
        assert time.monotonic() < until, "the notebook was not saved"
        page.wait_for_timeout(200)
    server.stop_kernels()
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    for number in range(widgets):
        picture = page.locator(".lab-fallback img").nth(number)
        picture.wait_for(state="attached", timeout=60_000)
        picture.scroll_into_view_if_needed(timeout=60_000)
        assert picture.is_visible()
    error = page.get_by_text("Error displaying widget")
    assert not any(error.nth(number).is_visible() for number in range(error.count()))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lesson(browser_page: Any, server: Server, path: Path) -> None:
    page = browser_page
    stay_local(page)
    open_lesson(page, server, path)
    run_all(page)
    for kind in ("stderr", "error"):
        assert page.locator(f"[data-mime-type='application/vnd.jupyter.{kind}']").all_text_contents() == []
    move_sliders(page)
    assert complaints(page) == []
    load_again_without_the_kernel(page, server, path)
