"""What one can do on the dashboard: send a prompt, look at its tokens, change the running engine."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from tests.browser.dashboard import Served, feed, made_up, wait_for

pytestmark = pytest.mark.browser


# ------------------------------------------------------------------------------------- the playground


def test_chat_is_the_default_where_the_model_can(page: Any) -> None:
    assert page.locator("#api").input_value() == "chat"
    told = page.locator("#prompt").input_value()
    page.select_option("#api", "text")
    continued = page.locator("#prompt").input_value()
    assert told and continued and told != continued, "each has a prompt of its own"
    page.fill("#prompt", "Of my own")
    page.select_option("#api", "chat")
    assert page.locator("#prompt").input_value() == "Of my own"


def test_a_model_without_a_chat_template_continues_text(browser_page: Any, served: Served) -> None:
    feed(browser_page, served, made_up(chat=False))
    wait_for(browser_page, "document.querySelector('#api').value === 'text'")
    assert browser_page.locator("#api option[value=chat]").is_disabled()
    assert browser_page.locator("#prompt").input_value().startswith("Once upon a time")


def test_an_answer_and_what_else_was_likely(page: Any) -> None:
    page.locator("#max_tokens").fill("24")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    wait_for(
        page, "document.querySelectorAll('#answer .token').length > 10 && !document.querySelector('#generate').disabled"
    )
    first, rate, tokens = page.locator("#readout dd").all_inner_texts()
    assert re.fullmatch(r"[\d.,]+ m?s", first) and float(rate.replace(",", "")) > 0 and int(tokens) <= 24

    page.locator("#answer .token").nth(2).hover()
    rows = page.locator("#alternatives tr")
    assert rows.count() in (5, 6) and page.locator("#alternatives .drawn").count() == 1
    drawn = page.locator("#alternatives .drawn").inner_text()
    page.mouse.move(0, 0)
    page.locator("#answer").focus()
    page.keyboard.press("Home")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    assert page.locator("#alternatives .drawn").inner_text() == drawn, "the keyboard shows what the mouse shows"
    shares = [float(text.split()[-2]) for text in rows.all_inner_texts() if "<" not in text]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.5


def test_chat_stop_and_errors(page: Any) -> None:
    page.select_option("#api", "chat")
    page.locator("#max_tokens").fill("512")
    page.click("#generate")
    page.locator("#answer .token").first.wait_for()
    page.click("#stop")
    wait_for(page, "!document.querySelector('#generate').disabled")
    page.select_option("#api", "text")
    page.fill("#prompt", "word " * 5000)
    page.click("#generate")
    wait_for(page, "document.querySelector('#answer .failed')")
    assert "Failed: " in page.locator("#answer").inner_text()
    page.errors[:] = [error for error in page.errors if "400" not in error]  # the browser's own note


# ------------------------------------------------------------------------------------- the switches


def test_a_switch_by_keyboard_marks_the_charts_and_they_move(page: Any, served: Served) -> None:
    before = len([e for e in served.events() if e["ev"] == "setting"])
    chart = page.locator(".chart").nth(1)
    points = int(chart.get_attribute("data-points"))
    page.locator("#max_num_seqs").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    wait_for(page, "document.querySelector('#switch-status').textContent === 'Done: max batch is 2.'")
    wait_for(page, "document.querySelectorAll('.chart')[1].dataset.marks > 0")
    assert "max batch 6 → 2" in page.locator("#changes li").first.inner_text()
    page.locator("#enable_prefix_caching").focus()
    page.keyboard.press("Space")
    wait_for(page, "document.querySelectorAll('#changes li').length >= 2")
    until = threading.Event()
    threads = served.load(5, until, prompt="Who sits, who waits", max_tokens=60)
    try:
        wait_for(
            page,
            "/running 2.*waiting [1-9]/.test(document.querySelectorAll('.chart')[1].innerText.replace('\\n', ' '))",
        )
        assert int(chart.get_attribute("data-points")) > points
    finally:
        until.set()
    for thread in threads:
        thread.join()
    page.fill("#max_num_seqs", "99")
    page.keyboard.press("Enter")
    wait_for(page, "document.querySelector('#switch-status').textContent.includes('launched for 1 to 6')")
    assert page.locator("#max_num_seqs").input_value() == "2", "as it is"
    page.fill("#max_num_seqs", "")
    page.keyboard.press("Enter")
    said = "'Not changed: max batch must be a whole number.'"
    wait_for(page, f"document.querySelector('#switch-status').textContent === {said}")
    assert page.locator("#max_num_seqs").input_value() == "2"
    page.fill("#max_num_seqs", "6")
    page.keyboard.press("Enter")
    page.locator("#enable_prefix_caching").check()
    wait_for(page, "document.querySelectorAll('#changes li').length >= 4")
    names = [e["name"] for e in served.events() if e["ev"] == "setting"][before:]
    assert names == ["max_num_seqs", "enable_prefix_caching", "max_num_seqs", "enable_prefix_caching"]
    page.errors[:] = [error for error in page.errors if "400" not in error]  # the browser's own note
