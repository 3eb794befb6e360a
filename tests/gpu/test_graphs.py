"""An engine with CUDA graphs gives the tokens that it gives without."""

from __future__ import annotations

import pytest

from labkit.config import SamplingParams
from labkit.llm import LLM

pytestmark = pytest.mark.gpu

WISHES = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "repetition_penalty": 1.2},  # while it runs, steps have no graph
    {"temperature": 0.0},
]


def answers(graphs: bool) -> list[list[int]]:
    """Batches that shrink from 23 to one, and one that was preempted on the way."""
    llm = LLM("toy", dtype="float32", cuda_graphs=graphs, num_kv_blocks=70, quiet=True)
    prompts = [[(i * 31 + j * 7) % 200 + 3 for j in range(1 + 5 * i)] for i in range(23)]
    params = [
        SamplingParams(**WISHES[i % 5], seed=i, ignore_eos=True, max_tokens=3 + (2 if i % 5 == 3 else 7) * i % 90)
        for i in range(23)
    ]
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        recorded = llm.engine.runner.graphs
        assert (recorded is not None) == graphs
        assert llm.engine.stats().preempted > 0
        assert recorded is None or {key[0] for key in recorded.recordings} == {"decode", "mixed"}
        assert recorded is None or len(recorded.recordings) > 4
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        llm.close()


def test_tokens_are_the_same() -> None:
    assert answers(True) == answers(False)
