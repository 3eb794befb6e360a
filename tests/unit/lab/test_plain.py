"""The plain model and the engine are the same model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.config import RopeConfig
from labkit.lab import seams
from labkit.lab.plain import PlainModel


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("toy", device="cpu", dtype="float32", max_model_len=128, num_kv_blocks=64, quiet=True)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> PlainModel:
    decoder = llm.engine.runner.model
    return PlainModel(decoder.config, decoder.weights)


def test_logprobs_agree_with_the_engine(llm: LLM, plain: PlainModel) -> None:
    ids = [309, 307, 262, 301, 14, 295, 303, 262, 777]
    [out] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    ours = plain(torch.tensor([ids]))[0].log_softmax(-1)
    assert ours.shape == (len(ids), llm.engine.model_config.vocab_size)
    assert out.prompt_logprobs is not None
    for position in range(1, len(ids)):
        entry = out.prompt_logprobs[position]
        assert entry is not None
        assert abs(ours[position - 1, ids[position]].item() - entry[ids[position]].logprob) < 1e-4


def test_rows_of_a_batch_do_not_meet(plain: PlainModel) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    together = plain(ids)
    assert torch.allclose(together[1], plain(ids[1:])[0], atol=1e-4)


def test_parameters_in_a_pass(plain: PlainModel) -> None:
    config = plain.config
    by_hand = config.vocab_size * config.hidden_size + config.hidden_size
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim + config.num_heads * config.head_dim
    by_hand += config.num_layers * config.hidden_size * (width + 3 * config.intermediate_size + 2)
    assert plain.parameters_in_a_pass == by_hand


def test_what_it_does_not_know_is_refused(plain: PlainModel) -> None:
    rope = RopeConfig(rope_type="linear", factor=2.0)
    with pytest.raises(ValueError, match="plain RoPE"):
        PlainModel(dataclasses.replace(plain.config, rope=rope), plain.weights)
    with pytest.raises(ValueError, match="full attention"):
        PlainModel(dataclasses.replace(plain.config, sliding_windows=(8,)), plain.weights)


@pytest.mark.parametrize("seam", ["greedy", "rms_norm", "add_rms_norm", "rope", "attention", "silu_mul", "sample"])
def test_the_engine_runs_through_every_seam(llm: LLM, seam: str) -> None:
    params = SamplingParams(temperature=0 if seam == "greedy" else 0.8, seed=1, max_tokens=3, ignore_eos=True)
    [before] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    with seams.swap(seam, seams.original(seam)) as swapped:
        [after] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert swapped.calls >= 3
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_swapped_function_decides(llm: LLM) -> None:
    with seams.swap("greedy", lambda logits: torch.full((len(logits),), 42)):
        [out] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert out.outputs[0].token_ids == [42] * 4
