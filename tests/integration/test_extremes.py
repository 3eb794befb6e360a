"""Numbers at the end of what is allowed: float32 must not run out of range on the way."""

from __future__ import annotations

import warnings

import pytest

from labkit import SamplingParams
from tests.integration.conftest import engine, run, tokens

PROMPTS = [[5, 6, 7], [8, 9, 30, 31], [100] * 20]


def answers(llm, **fields):
    return tokens(run(llm, PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True, seed=3, **fields)))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with engine(checkpoint("llama")) as llm:
        yield llm


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9, "min_p": 0.01}])
@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-40, 1e-38, 2e-38, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy(llm, temperature, filters):
    assert answers(llm, temperature=temperature, **filters) == answers(llm, temperature=0)


@pytest.mark.parametrize("sampled", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.001, "top_k": 50}])
def test_a_tiny_or_huge_repetition_penalty(llm, sampled):
    for extreme, large in ((1e-38, 1e-15), (1e-45, 1e-15), (1e-320, 1e-15), (1e39, 1e15), (1e300, 1e15)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert answers(llm, repetition_penalty=extreme, **sampled) == answers(
                llm, repetition_penalty=large, **sampled
            )


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}])
def test_a_huge_temperature(llm, filters):
    want = answers(llm, temperature=1e18, **filters)
    for temperature in (1e38, 1e39, 1e300):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert answers(llm, temperature=temperature, min_tokens=12, **filters) == want
