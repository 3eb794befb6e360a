from __future__ import annotations

import pytest

from labkit.bench.load.numbers import compare, meets, queue_buckets, queue_spread, spread, summarise
from labkit.bench.load.record import Objective, Spread, Timing
from tests.unit.bench.load.fake_server import QUEUE
from tests.unit.bench.load.samples import a_load_run

WHOLE = Timing(sent_s=1.0, first_s=1.5, last_s=2.5, end_s=2.6, prompt_tokens=10, output_tokens=11, chunks=6)
LATE = Timing(sent_s=2.0, first_s=4.0, last_s=4.5, end_s=5.0, prompt_tokens=10, output_tokens=51, chunks=51)
LOST = Timing(sent_s=0.0, end_s=10.0, prompt_tokens=10, output_tokens=3, chunks=3, error="cut off")


def test_a_run_by_hand() -> None:
    s = summarise([WHOLE, LATE, LOST], [0.1, 0.2, 0.3], Objective())
    assert (s.requests, s.whole, s.errors, s.seconds) == (3, 2, {"cut off": 1}, 10.0)
    assert (s.tok_s, s.prompt_tok_s, s.chunks_per_token) == (6.2, 2.0, round(57 / 62, 4)), "whole answers only"
    assert s.ttft_ms is not None and s.ttft_ms.p50 == 1250.0, "500 and 2000"
    assert s.tpot_ms is not None and s.tpot_ms.p50 == 55.0, "1000 / 10 and 500 / 50"
    assert s.gap_ms is not None and s.gap_ms.p50 == 200.0
    assert s.e2e_ms is not None and s.e2e_ms.p50 == 2300.0
    assert (s.goodput_s, s.good_share, s.queue_ms) == (None, None, None)


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        (Objective(ttft_ms=500), 1),
        (Objective(tpot_ms=10), 1),
        (Objective(ttft_ms=500, tpot_ms=10), 0),
        (Objective(ttft_ms=2000, tpot_ms=100), 2),
    ],
)
def test_goodput_counts_answers_that_met_all_of_the_objective(objective: Objective, good: int) -> None:
    s = summarise([WHOLE, LATE, LOST], [], objective)
    assert (s.goodput_s, s.good_share) == (good / 10, round(good / 3, 4))
    assert not meets(LOST, Objective(ttft_ms=1e9)), "what failed is never good"


def test_one_token_has_no_time_per_token_and_nothing_has_no_percentiles() -> None:
    one = Timing(sent_s=0.0, first_s=1.0, last_s=1.0, end_s=1.0, prompt_tokens=1, output_tokens=1, chunks=1)
    assert summarise([one], [], Objective()).tpot_ms is None and meets(one, Objective(tpot_ms=1.0))
    s = summarise([LOST], [], Objective(ttft_ms=1.0))
    assert (s.ttft_ms, s.e2e_ms, s.tok_s, s.chunks_per_token, s.goodput_s) == (None, None, 0.0, None, 0.0)
    assert spread([]) is None and spread([1.0, 2.0, 3.0]) == Spread(2.0, 2.9, 2.98)


def test_the_queue_is_what_the_histogram_gained() -> None:
    before, after = queue_buckets(QUEUE.format(10, 0)), queue_buckets(QUEUE.format(30, 0))
    # All of them in the bucket from 0 to 0.1 s, evenly as far as anybody knows.
    assert queue_spread(before, after) == Spread(50.0, 95.0, 99.0)
    assert queue_spread(None, after) == Spread(50.0, 95.0, 99.0)
    assert queue_spread(after, after) is None and queue_spread(before, None) is None
    assert queue_buckets("# nothing\n") is None


def test_the_queue_between_two_buckets() -> None:
    inf = float("inf")
    assert queue_spread({0.1: 0, 0.2: 0, inf: 0}, {0.1: 50, 0.2: 95, inf: 100}) == Spread(100.0, 200.0, 200.0)


def test_a_comparison_is_medians_over_the_runs() -> None:
    ours = [a_load_run("labkit", i, rate, ttft) for i, (rate, ttft) in enumerate([(300, 5), (100, 7), (200, 6)])]
    theirs = [a_load_run("vllm", 3 + i, rate, 12) for i, rate in enumerate([80, 100])]
    (row,) = compare("tiny", [*ours, *theirs, a_load_run("vllm", 9, 50, 12, load="http256")])
    assert row == {
        "model": "tiny",
        "workload": "http64",
        "tok_s": 200,
        "vllm_tok_s": 90,
        "ratio": 2.222,
        "ttft_p99_ms": 12,
        "vllm_ttft_p99_ms": 24,
        "tpot_p99_ms": 2,
        "vllm_tpot_p99_ms": 2,
    }
