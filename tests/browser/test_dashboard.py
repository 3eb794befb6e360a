"""The dashboard in Chromium, on a running server with the toy; and with made-up events, for what this machine lacks."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from tests.browser.dashboard import KEY, Served, feed, made_up, numbers, wait_for

pytestmark = pytest.mark.browser

TILES = (
    "tokens_out tokens_in running waiting preempted ttft gap kv prefix speculation "
    "cpu memory gpu_memory gpu_use power energy temperature clocks"
).split()
NOT_MEASURED = "not measured on this machine"


# ------------------------------------------------------------------------------------- the key


def test_the_page_asks_for_the_key(browser_page: Any, served: Served) -> None:
    page = browser_page
    page.goto(served.url)
    assert page.locator("#live").is_hidden() and page.evaluate("document.activeElement.id") == "key"
    assert "dev-key" in page.locator("#key-hint").inner_text(), "this machine is its own"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#key-error').textContent.includes('does not know that key')")
    assert page.locator("#live").is_hidden() and page.locator("#key").input_value() == ""
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#live:not([hidden])")
    page.reload()
    page.wait_for_selector("#live:not([hidden])")
    page.get_by_role("button", name="Forget key").click()
    assert page.locator("#welcome").is_visible()
    page.reload()
    assert page.locator("#welcome").is_visible(), "it is forgotten"
    assert [e for e in page.errors if "401" not in e] == []


def test_what_is_injected_does_not_run(browser_page: Any, served: Served) -> None:
    browser_page.goto(served.url)
    inject = """() => {
        const script = document.createElement('script');
        script.textContent = 'window.ran = true';
        document.body.append(script);
        document.body.insertAdjacentHTML('beforeend', '<p id="styled" style="color: rgb(1, 2, 3)">');
        return [window.ran ?? false, getComputedStyle(document.getElementById('styled')).color];
    }"""
    ran, colour = browser_page.evaluate(inject)
    assert ran is False and colour != "rgb(1, 2, 3)"
    assert any("Content Security Policy" in error for error in browser_page.errors)


@pytest.mark.parametrize("width", [1280, 390])
def test_docs_are_a_page_without_a_network(browser_page: Any, served: Served, width: int) -> None:
    asked: list[str] = []
    browser_page.on("request", lambda request: asked.append(request.url))
    browser_page.set_viewport_size({"width": width, "height": 844})
    browser_page.goto(served.url.replace("/dashboard", "/docs"))
    assert browser_page.locator("tr", has_text="top_logprobs").is_visible()
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
    assert contrast(browser_page, ".docs a") >= 4.5 and contrast(browser_page, ".docs td") >= 4.5
    assert len(asked) >= 3 and all(url.startswith(served.handle.url) for url in asked)
    assert browser_page.errors == []


# ------------------------------------------------------------------------------------- the numbers


def test_two_loads_change_every_tile(page: Any, served: Served) -> None:
    """Or it says that it is not measured; speculation says off. Nothing on the page is made up."""
    assert list(numbers(page)) == TILES
    light, heavy = threading.Event(), threading.Event()
    threads = served.load(1, light, prompt="A short one", max_tokens=40)
    try:
        wait_for(
            page,
            "['ttft', 'prefix'].every(t => document.querySelector(`[data-tile=${t}] .number`).textContent !== '–')",
        )
        first = numbers(page)
    finally:
        light.set()
    for thread in threads:
        thread.join()
    threads = served.load(8, heavy, prompt="A long one, again and again. " * 6, max_tokens=120)
    try:
        end = time.monotonic() + 60
        while same := [t for t, text in numbers(page).items() if text == first[t] and text != NOT_MEASURED]:
            if same == ["speculation"]:
                break
            assert time.monotonic() < end, f"the same under both loads: {same}"
            time.sleep(0.3)
        assert numbers(page)["speculation"] == "off"
        assert int(page.locator("#map").get_attribute("data-shared")) > 0, "they have the same beginning"
    finally:
        heavy.set()
    for thread in threads:
        thread.join()


def test_numbers_of_a_gpu_and_those_that_it_does_not_tell(browser_page: Any, served: Served) -> None:
    names = "memory_total_bytes power_watts energy_joules utilization temperature_celsius sm_clock_mhz memory_clock_mhz"
    gpu = {**dict.fromkeys(names.split()), "name": "Some card", "memory_used_bytes": 3 * 2**30}
    process = {"cpu_cores": None, "memory_bytes": None}
    machine = {"t": 1.0, "tokens_out": 100, "process": process, "gpu": {**gpu, "energy_joules": 50.0}}
    later = {
        "t": 3.0,
        "tokens_out": 200,
        "process": process,
        "gpu": {**gpu, "energy_joules": 90.0, "power_watts": 20.0},
    }
    second = made_up(machine=later, tokens_out=200)
    second["picture"] = {**second["picture"], "t": 3.0}
    feed(browser_page, served, made_up(machine=machine, tokens_out=100), second)
    wait_for(browser_page, "document.querySelector('[data-tile=power] .number').textContent === '20.0'")
    shown = numbers(browser_page)
    assert re.sub(r"\s", " ", shown["gpu_memory"]) == "3.00GiB" and shown["power"] == "20.0W"
    assert shown["energy"] == "0.4J", "40 joules for 100 tokens"
    assert shown["tokens_out"] == "50.0/s"
    for tile in ("gpu_use", "temperature", "clocks", "cpu", "memory"):
        assert shown[tile] == NOT_MEASURED
    assert shown["ttft"] == shown["gap"] == shown["prefix"] == "–"
    assert browser_page.locator("#model").inner_text() == "<b>made up</b>", "text, not markup"
    assert browser_page.errors == []


def test_a_silent_engine_is_seen(browser_page: Any, served: Served) -> None:
    feed(browser_page, served, made_up())
    wait_for(browser_page, "document.querySelector('#state').dataset.state === 'bad'")
    assert "trying again" in browser_page.locator("#state").inner_text()
    browser_page.unroute("**/dashboard/events")
    browser_page.wait_for_selector("#welcome:not([hidden])"), "the key is not this server's"


def test_an_hour_in_bounded_memory(page: Any) -> None:
    script = """async () => {
        const { History } = await import('/dashboard/history.js');
        const history = new History(['mean', 'peak', 'gap'], ['peak']);
        for (let i = 0; i < 20000; i += 1) history.push(1e9 + i / 2, { mean: i % 10, peak: i % 10, gap: null });
        const view = history.view(3600, ['mean', 'peak', 'gap']);
        const floats = history.fine.values.length + history.coarse.values.length;
        return { times: view[0], mean: view[1].slice(0, 100), peak: view[2].slice(0, 100), gap: view[3], floats };
    }"""
    got = page.evaluate(script)
    times = got["times"]
    assert 3500 <= times[-1] - times[0] <= 3600 and times == sorted(set(times))
    assert len(times) < 1400 and got["floats"] < 10_000
    assert set(got["mean"]) == {4.5} and set(got["peak"]) == {9} and set(got["gap"]) == {None}


# ------------------------------------------------------------------------------------- pictures, looks


def test_map_and_timeline_by_keyboard(page: Any) -> None:
    page.click("#generate")
    wait_for(page, "document.querySelector('#timeline-caption').textContent.startsWith('Step ')")
    page.locator("#map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#map-caption").inner_text().startswith("Block 1: ")
    page.locator("#timeline").focus()
    wait_for(page, "!document.querySelector('#generate').disabled")
    page.keyboard.press("ArrowLeft")
    last = page.locator("#timeline-caption").inner_text()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#timeline-caption").inner_text() != last
    assert re.match(r"Step [\d,]+, [\d.]+ m?s · ", last)


def test_a_tile_explains_itself_on_focus(page: Any) -> None:
    page.locator("[data-tile=kv]").focus()
    assert page.locator("#explain").inner_text().startswith("KV blocks in use: ")
    assert page.evaluate("[...document.querySelectorAll('.tile')].every(t => t.ariaDescription.length > 20)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out_and_text_is_readable(page: Any, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = """[...document.querySelectorAll('.tile *, .keys, label')]
        .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""
    assert page.evaluate(cut) == []
    for selector in (".tile .label", ".tile .number", "#generate", ".caption", ".quiet", ".key"):
        assert contrast(page, selector) >= 4.5, selector


def contrast(page: Any, selector: str) -> float:
    """Of a text and what lies behind it, as WCAG computes it."""
    script = """(selector) => {
        let element = document.querySelector(selector), colour = getComputedStyle(element).color, behind;
        do { behind = getComputedStyle(element).backgroundColor; element = element.parentElement; }
        while (behind === 'rgba(0, 0, 0, 0)' && element);
        return [colour, behind];
    }"""
    light, dark = sorted(map(luminance, page.evaluate(script, selector)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_the_theme_button(page: Any) -> None:
    page.emulate_media(color_scheme="light")
    behind = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(behind)
    page.click("#theme")
    assert page.evaluate(behind) == light and page.locator("#theme").inner_text() == "Theme: light"
    page.click("#theme")
    assert page.evaluate(behind) != light
    page.click("#theme")
    assert page.evaluate(behind) == light and page.locator("#theme").inner_text() == "Theme: system"
