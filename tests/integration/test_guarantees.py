"""Guarantees 2 and 4 on the real engine, over random lives: tokens as if alone, no block lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit import SamplingParams
from tests.integration.conftest import assert_idle, engine, run

STEMS = [list(range(10 + i, 10 + i + n)) for i, n in enumerate((0, 16, 33))]


@st.composite
def request(draw: st.DrawFn) -> tuple[list[int], SamplingParams]:
    prompt = draw(st.sampled_from(STEMS)) + draw(st.lists(st.integers(5, 300), min_size=1, max_size=24))
    most = draw(st.integers(1, 12))
    fields: dict[str, Any] = dict(
        max_tokens=most,
        seed=draw(st.integers(0, 2**63)),
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, most)),
        n=draw(st.sampled_from([1, 1, 1, 3])),
    )
    if draw(st.booleans()):
        fields |= dict(top_p=draw(st.sampled_from([0.5, 0.95])), top_k=draw(st.sampled_from([0, 1, 20])))
    if draw(st.booleans()):
        fields |= dict(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={30: 3.0})
    if draw(st.booleans()):
        fields |= dict(stop_token_ids=draw(st.lists(st.integers(5, 300), min_size=10, max_size=10)))
    return prompt, SamplingParams(**fields)


SHAPES = st.fixed_dictionaries(
    {
        "num_kv_blocks": st.sampled_from([6, 9, 40]),
        "max_num_seqs": st.sampled_from([1, 3, 8]),
        "max_num_batched_tokens": st.sampled_from([7, 20, 512]),
        "scheduler": st.sampled_from(["continuous", "continuous", "static", "none"]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "admission": st.sampled_from(["optimistic", "reserve"]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "behind": st.sampled_from([0, 1, 1]),
    }
)


def answers(outs: list[Any]) -> list[Any]:
    return [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in out.outputs] for out in outs]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(request(), min_size=1, max_size=6), shape=SHAPES, leave=st.integers(0, 5))
def test_tokens_as_if_alone(requests, shape, leave, checkpoint, request_alone):
    want = [request_alone(prompt, params) for prompt, params in requests]
    with engine(checkpoint("llama"), **shape) as llm:
        abandoned = llm.stream(*requests[leave % len(requests)])  # somebody who leaves half-way
        next(abandoned)
        outs = run(llm, [p for p, _ in requests], [s for _, s in requests])
        abandoned.close()
        assert answers(outs) == want
        assert_idle(llm)
        # The prefix cache that these lives left behind holds nothing false.
        assert answers(run(llm, [p for p, _ in requests], [s for _, s in requests])) == want


@pytest.fixture(scope="module")
def request_alone(checkpoint):
    with engine(checkpoint("llama"), scheduler="none", enable_prefix_caching=False) as llm:
        yield lambda prompt, params: answers(run(llm, [prompt], params))[0]
