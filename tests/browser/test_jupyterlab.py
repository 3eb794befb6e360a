"""JupyterLab as `make lab` starts it, before any lesson: it opens on the lessons, quietly, with one kernel."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def test_opens_on_the_lessons_without_a_word(browser_page: Any, jupyterlab: str) -> None:
    browser_page.goto(jupyterlab)
    browser_page.locator(".jp-DirListing-item", has_text="README.md").wait_for(timeout=120_000)
    launcher = browser_page.locator('.jp-LauncherCard[data-category="Notebook"]')
    launcher.first.wait_for(timeout=60_000)
    assert launcher.count() == 1
    assert browser_page.locator(".jp-Dialog").count() == 0
    # Jupyter's offer to fetch its news: it needs a network, and a beginner does not need one more question.
    browser_page.wait_for_timeout(2000)
    assert browser_page.locator(".Toastify__toast").count() == 0
    assert browser_page.errors == []


def test_a_cell_runs_in_this_python(browser_page: Any, jupyterlab: str) -> None:
    import sys

    browser_page.goto(jupyterlab)
    browser_page.locator('.jp-LauncherCard[data-category="Console"]').first.click(timeout=120_000)
    code = browser_page.locator(".jp-CodeConsole-input .cm-content")
    code.click()
    code.press_sequentially("import sys, labkit; print(sys.prefix)")
    code.press("Shift+Enter")
    browser_page.locator(".jp-OutputArea-output", has_text=sys.prefix).wait_for(timeout=60_000)
