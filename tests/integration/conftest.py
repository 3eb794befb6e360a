"""Small checkpoints, made once a session, and an oracle: transformers, float32, eager attention, no cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit import LLM
from tests import checkpoints

LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48
)
YARN = dict(rope_type="yarn", factor=3.0, original_max_position_embeddings=48)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", dict(tie_word_embeddings=True, num_hidden_layers=1, vocab_size=401)),
    "llama-linear": ("llama", dict(rope_scaling=dict(type="linear", factor=2.0))),
    "llama-llama3": ("llama", dict(rope_scaling=LLAMA3, rope_theta=500000.0)),
    "llama-yarn": ("llama", dict(rope_scaling=YARN)),
    "llama-sharded": ("llama", dict(shards=3)),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=20, max_window_layers=1)),
    "qwen3": ("qwen3", {}),
    "qwen3-bfloat16": ("qwen3", dict(tie_word_embeddings=True, dtype=torch.bfloat16)),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """checkpoint("qwen2") is its folder, written on first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def make(name: str) -> Path:
        family, fields = CHECKPOINTS[name]
        return checkpoints.write_checkpoint(root / name, family, **fields)

    return make


class Oracle:
    """Log-probabilities of every next token by one plain pass over the whole sequence."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> Tensor:
        """[len(ids), V]: row i is about token i + 1."""
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)


@pytest.fixture(scope="session")
def oracle(checkpoint):
    return functools.cache(lambda name: Oracle(checkpoint(name)))


@contextmanager
def engine(folder: Path, behind: int = 0, **fields: Any) -> Iterator[LLM]:
    """An LLM on the CPU in float32 with room for 2048 tokens; at its end no block may be in use.

    With `behind` its host reads results as late as on a GPU.
    """
    block_size = fields.get("block_size", 16)
    fields = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 2048 // block_size, **fields}
    with LLM(str(folder), quiet=True, **fields) as llm:
        llm.engine.steps_behind = behind
        yield llm
        assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_in_use) == (0, 0, 0)
    assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


def run(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outs: list[Any]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outs]
