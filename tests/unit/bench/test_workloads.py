from __future__ import annotations

import random

import pytest

from labkit.bench.workloads import WORKLOADS, make_workload
from labkit.errors import LabkitError


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_every_time_whatever_was_drawn_before(name: str) -> None:
    first = make_workload(name, 49152)
    random.seed(123)
    assert make_workload(name, 49152) == first
    assert len(first.prompts) == len(first.max_tokens)


def test_nano256_is_nano_vllms_own() -> None:
    r = random.Random(0)
    prompts = [[r.randint(0, 10000) for _ in range(r.randint(100, 1024))] for _ in range(256)]
    lengths = [r.randint(100, 1024) for _ in range(256)]
    workload = make_workload("nano256", 151936)
    assert (workload.prompts, workload.max_tokens, workload.temperature) == (prompts, lengths, 0.6)


@pytest.mark.parametrize(
    ("name", "requests", "tokens_in", "tokens_out", "counts"),
    [
        ("b1", 1, 128, 512, "output"),
        ("b8", 8, 128, 512, "output"),
        ("b64", 64, 128, 512, "output"),
        ("decode1", 1, 48, 128, "output"),
        ("decode8", 8, 48, 128, "output"),
        ("prefill512", 1, 512, 1, "prompt"),
        ("prefill32x2048", 32, 2048, 1, "prompt"),
    ],
)
def test_shapes(name: str, requests: int, tokens_in: int, tokens_out: int, counts: str) -> None:
    workload = make_workload(name, 49152)
    assert [len(prompt) for prompt in workload.prompts] == [tokens_in] * requests
    assert workload.max_tokens == [tokens_out] * requests
    assert workload.counts == counts
    assert workload.longest == tokens_in + tokens_out
    assert len({tuple(prompt) for prompt in workload.prompts}) == requests


@pytest.mark.parametrize("name", WORKLOADS)
def test_ids_stay_in_a_small_vocabulary(name: str) -> None:
    ids = {token for prompt in make_workload(name, 300).prompts for token in prompt}
    assert max(ids) < 300 and len(ids) > 40


def test_shortened_keeps_the_prompts() -> None:
    workload = make_workload("decode8", 1000)
    short = workload.shortened(5)
    assert short.prompts == workload.prompts and short.max_tokens == [5] * 8
    assert make_workload("prefill512", 1000).shortened(5).max_tokens == [1]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LabkitError, match=r"'b7'.*decode1.*b64, prefill32x2048"):
        make_workload("b7", 1000)
