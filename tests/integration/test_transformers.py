"""The whole engine against transformers: every family, prompts over block edges, chunked, in company."""

from __future__ import annotations

import random

import pytest

from labkit import SamplingParams
from tests.integration.conftest import CHECKPOINTS, engine, run

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 300)


def prompts(name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(5, 300) for _ in range(n)] for n in LENGTHS]


def check(reference, prompt, out, k: int = 3) -> None:
    """Tokens are the oracle's best ones; all log-probabilities agree within 1e-4."""
    ids = out.outputs[0].token_ids
    want = reference.logprobs(prompt + ids)
    rows = [*zip(out.prompt_logprobs[1:], prompt[1:]), *zip(out.outputs[0].logprobs, ids)]
    for position, (entries, token) in enumerate(rows):
        assert len(entries) in (k, k + 1) and token in entries
        for other, entry in entries.items():
            assert abs(entry.logprob - float(want[position, other])) < 1e-4
        if position >= len(prompt) - 1:
            assert float(want[position].max() - want[position, token]) < 3e-4, "not the best token"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logprobs_of_prompt_and_answer(name, checkpoint, oracle):
    asked = prompts(name)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    with engine(checkpoint(name)) as llm:
        outs = run(llm, asked, params)
    for prompt, out in zip(asked, outs):
        check(oracle(name), prompt, out)


@pytest.mark.parametrize("fields", [dict(max_num_batched_tokens=13), dict(block_size=8, max_num_seqs=3)], ids=str)
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_chunks_and_blocks_change_nothing(name, fields, checkpoint, oracle):
    asked = prompts(name)[:8]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    with engine(checkpoint(name), **fields) as llm:
        outs = run(llm, asked, params)
    for prompt, out in zip(asked, outs):
        check(oracle(name), prompt, out)


def test_a_window_over_a_cached_prefix_and_chunks(checkpoint, oracle):
    """24 tokens under a window of 20, of which 16 come from the cache, then more."""
    [prompt] = [p[:24] for p in prompts("window") if len(p) == 33]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    with engine(checkpoint("mistral"), max_num_batched_tokens=5) as llm:
        first, second = (run(llm, [prompt], params)[0] for _ in "ab")
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    want = oracle("mistral").logprobs(prompt + second.outputs[0].token_ids)
    for i, (token, entries) in enumerate(zip(second.outputs[0].token_ids, second.outputs[0].logprobs)):
        assert abs(entries[token].logprob - float(want[23 + i, token])) < 1e-4
