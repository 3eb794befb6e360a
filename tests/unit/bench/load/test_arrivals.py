from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest

from labkit.bench.load.arrivals import Bursts, Closed, Poisson, Recorded, Row, read_recording, times
from labkit.errors import LabkitError


def test_a_closed_loop_has_no_times() -> None:
    assert times(Closed(3), 2, Random(0)) == [None, None]


def test_poisson_has_its_rate_and_gaps_that_vary_as_much_as_they_are_long() -> None:
    due = times(Poisson(4.0), 4001, Random(1))
    gaps = [b - a for a, b in itertools.pairwise(due)]  # type: ignore[operator]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert due[0] == 0 and min(gaps) > 0
    assert mean == pytest.approx(0.25, rel=0.05) and deviation == pytest.approx(mean, rel=0.1)


def test_a_burst_comes_at_once_and_the_rate_is_that_of_requests() -> None:
    due = times(Bursts(8.0, 4), 4002, Random(1))
    begins = sorted(set(due))  # type: ignore[type-var]
    assert [due.count(t) for t in begins[:-1]] == [4] * 1000 and due.count(begins[-1]) == 2
    assert begins[-1] == pytest.approx(4000 / 8, rel=0.1)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("arrival", [Poisson(2.0), Bursts(2.0, 3)])
def test_a_seed_is_a_schedule(arrival: Poisson | Bursts) -> None:
    assert times(arrival, 20, Random(5)) == times(arrival, 20, Random(5)) != times(arrival, 20, Random(6))


def test_a_recording_begins_at_zero_and_cannot_be_longer_than_it_is(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(
        '{"arrival_s": 12.5, "prompt_tokens": 9, "output_tokens": 2}\n'
        '{"arrival_s": 10, "prompt_tokens": 5, "output_tokens": 3, "more": 1}\n'
    )
    recorded = read_recording(path)
    assert recorded == Recorded("r.jsonl", (Row(10.0, 5, 3), Row(12.5, 9, 2)))
    assert times(recorded, 2, Random(0)) == [0.0, 2.5] and str(recorded) == "as in r.jsonl"
    with pytest.raises(LabkitError, match="holds 2 requests, 3"):
        times(recorded, 3, Random(0))


def test_a_trace_of_our_engine_is_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"t": 1.0, "step": 0, "ev": "submit", "req": "a", "prompt": 20}\n'
        '{"t": 1.5, "step": 0, "ev": "submit", "req": "b", "prompt": 4}\n'
        '{"t": 1.6, "step": 0, "ev": "first_token", "req": "a"}\n'
        '{"t": 1.7, "step": 1, "ev": "step", "prefill": [["b", 0, 4]], "decode": ["a"], "ms": 1.0, "free_blocks": 1}\n'
        '{"t": 1.8, "step": 2, "ev": "step", "prefill": [], "decode": ["a"], "ms": 1.0, "free_blocks": 1}\n'
        '{"t": 1.9, "step": 2, "ev": "cancel", "req": "b"}\n'
    )
    assert read_recording(path).rows == (Row(1.0, 20, 3),), "b never had a token"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must hold"),
        ("{", "no recording"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "a token in"),
    ],
)
def test_what_is_no_recording(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(LabkitError, match=told):
        read_recording(path)
    with pytest.raises(LabkitError, match="cannot read"):
        read_recording(tmp_path / "no.jsonl")
