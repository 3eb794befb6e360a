from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from labkit.bench.load.client import Received, Target, fetch, open_session
from labkit.bench.load.record import Timing
from labkit.bench.load.workloads import Ask
from tests.unit.bench.load.fake_server import FIRST_SECONDS, GAP_SECONDS, FakeServer, running

ASK = Ask([5, 6, 7], ("be kind", "hello there"), max_tokens=7)


def ask(target: Target, ask: Ask = ASK) -> tuple[Timing, Received]:
    async def run() -> tuple[Timing, Received]:
        async with open_session(target) as session:
            return await fetch(session, target, ask, temperature=0.6)

    return asyncio.run(run())


def ask_fake(model: str = "plain", per_chunk: int = 1, **how: object) -> tuple[Timing, Received, FakeServer]:
    with running(FakeServer(per_chunk)) as server:
        timing, received = ask(replace(Target(server.url, model), **how))  # type: ignore[arg-type]
    return timing, received, server


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_tokens_are_those_of_the_answer_however_they_lie_in_chunks(api: str) -> None:
    timing, _, _ = ask_fake(per_chunk=3, api=api)
    assert (timing.output_tokens, timing.chunks, timing.counted_by, timing.error) == (7, 3, "usage", None)
    assert timing.prompt_tokens == 7, "as the server counts them"


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_tokens_that_are_listed_are_counted_one_by_one(api: str) -> None:
    timing, received, server = ask_fake(per_chunk=3, api=api, list_tokens=True)
    assert (timing.output_tokens, timing.chunks, timing.counted_by) == (7, 3, "tokens")
    assert received.usage is not None and received.usage.completion_tokens == 7
    assert server.bodies[0]["logprobs"] == (True if api == "chat" else 0)


def test_without_any_count_there_are_only_chunks_and_it_says_so() -> None:
    timing, _, _ = ask_fake("no-usage", per_chunk=3)
    assert (timing.output_tokens, timing.counted_by, timing.error) == (3, "chunks", None)
    assert timing.prompt_tokens == len(ASK.prompt)


def test_no_piece_is_seen_before_it_was_sent() -> None:
    timing, received, _ = ask_fake()
    assert timing.first_s is not None and timing.last_s is not None and timing.longest_gap_s is not None
    assert timing.first_s - timing.sent_s >= FIRST_SECONDS
    assert timing.last_s - timing.sent_s >= FIRST_SECONDS + 6 * GAP_SECONDS
    assert timing.end_s - timing.sent_s >= FIRST_SECONDS + 7 * GAP_SECONDS, "the end comes after the last text"
    assert received.stamps == sorted(received.stamps) and len(received.stamps) == 7
    assert timing.longest_gap_s >= (timing.last_s - timing.first_s) / 6


def test_a_chats_first_chunk_without_text_is_no_token() -> None:
    timing, _, server = ask_fake(api="chat")
    assert timing.chunks == 7 and timing.first_s is not None and timing.first_s - timing.sent_s >= FIRST_SECONDS
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello there"},
    ]


def test_what_is_asked() -> None:
    _, _, server = ask_fake()
    assert server.bodies == [
        {
            "model": "plain",
            "prompt": [5, 6, 7],
            "max_tokens": 7,
            "temperature": 0.6,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]
    assert "ignore_eos" not in Target("", "m", ignore_eos=False).body(ASK, 0.6)


@pytest.mark.parametrize(
    ("model", "error", "chunks"),
    [
        ("busy", "http 503", 0),
        ("error", "error in the stream", 1),
        ("cut", "cut off", 1),
        ("garbage", "unreadable event", 1),
        ("short", "not as many tokens as asked for", 6),
    ],
)
def test_errors_by_kind(model: str, error: str, chunks: int) -> None:
    timing, _, _ = ask_fake(model)
    assert (timing.error, timing.chunks) == (error, chunks)
    assert timing.end_s >= timing.sent_s


def test_a_short_answer_is_whole_where_the_model_may_end_it() -> None:
    assert ask_fake("short", ignore_eos=False)[0].error is None


def test_a_server_that_stops_sending_is_given_up() -> None:
    timing, _, _ = ask_fake("stuck", timeout_s=0.3)
    assert (timing.error, timing.chunks) == ("timeout", 1)


def test_nobody_there() -> None:
    timing, _ = ask(Target("http://127.0.0.1:9", "m"))
    assert timing.error == "connection: ClientConnectorError" and timing.first_s is None
