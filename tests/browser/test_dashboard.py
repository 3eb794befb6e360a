"""The dashboard in Chromium, on a running server with the toy; and with made-up events, for what this machine lacks."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from labkit.config import EngineConfig
from labkit.engine.picture import Picture
from labkit.engine.stats import EngineStats
from labkit.server.config import ServerConfig
from labkit.server.serve import start

pytestmark = pytest.mark.browser

KEY = "a-key-of-these-tests"
TILES = (
    "tokens_out tokens_in running waiting preempted ttft gap kv prefix speculation "
    "cpu memory gpu_memory gpu_use power energy temperature clocks"
).split()
NOT_MEASURED = "not measured on this machine"


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


@pytest.fixture(scope="module")
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


# ------------------------------------------------------------------------------------- the key


def test_the_page_asks_for_the_key(browser_page: Any, served: Served) -> None:
    page = browser_page
    page.goto(served.url)
    assert page.locator("#live").is_hidden() and page.evaluate("document.activeElement.id") == "key"
    assert "dev-key" in page.locator("#key-hint").inner_text(), "this machine is its own"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#key-error').textContent.includes('valid key')")
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


def made_up(**fields: Any) -> dict[str, Any]:
    """An event as the server sends it."""
    settings = {"policy": "fcfs", "enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return {
        **dataclasses.asdict(EngineStats(kv_blocks_total=3, kv_blocks_free=3)),
        "model": "<b>made up</b>",
        "time": 1e9,
        "state": "running",
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


# ------------------------------------------------------------------------------------- the playground


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
    page.fill("#max_num_seqs", "6")
    page.keyboard.press("Enter")
    page.locator("#enable_prefix_caching").check()
    wait_for(page, "document.querySelectorAll('#changes li').length >= 4")
    names = [e["name"] for e in served.events() if e["ev"] == "setting"][before:]
    assert names == ["max_num_seqs", "enable_prefix_caching", "max_num_seqs", "enable_prefix_caching"]
    page.errors[:] = [error for error in page.errors if "400" not in error]  # the browser's own note


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
