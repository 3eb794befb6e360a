"""The memory plan: the arithmetic by hand, what cuts what, and refusals with all the numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from labkit.config import EngineConfig, ModelConfig
from labkit.errors import ModelError
from labkit.models import memory
from labkit.models.hf_config import parse_config
from labkit.models.memory import MemoryPlan, plan_memory
from tests.checkpoints import config_json

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
# 0.6 billion parameters, 114,688 bytes of KV for each token in 16 bits
QWEN3: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def model(family: str = "llama", **fields: Any) -> ModelConfig:
    return parse_config(config_json(family, **fields), Path("config.json"))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(cpu=16 * GIB, gpu=(140 * GIB, 141 * GIB))
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=state.cpu))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: state.gpu)
    return state


def plan(
    config: ModelConfig, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **fields: Any
) -> MemoryPlan:
    return plan_memory(config, EngineConfig(**fields), device, dtype)


def test_sizes_of_a_known_model(free: SimpleNamespace) -> None:
    got = plan(model("qwen3", **QWEN3), CUDA, torch.bfloat16)
    assert got.weights_bytes == 596_049_920 * 2
    assert got.kv_bytes_per_block == 114_688 * 16
    assert got.available_bytes == int(0.9 * 141 * GIB) - GIB
    left = got.available_bytes - got.weights_bytes - got.activation_bytes - got.graph_bytes
    assert got.num_kv_blocks == left // got.kv_bytes_per_block and got.kv_bytes == got.num_kv_blocks * 114_688 * 16
    assert got.max_model_len == 40960


def test_activations_by_hand(free: SimpleNamespace) -> None:
    # tokens × (3 hidden + (2·4 + 2·2) heads × 16 + 3 × 96) float32, and two rows of logits for each sequence
    assert plan(model()).activation_bytes == 512 * (3 * 64 + 12 * 16 + 3 * 96) * 4 + 2 * 256 * 347 * 4
    small = plan(model(), max_num_batched_tokens=20, max_num_seqs=6).activation_bytes
    assert small == 20 * (3 * 64 + 12 * 16 + 3 * 96) * 4 + 2 * 6 * 347 * 4


def test_graphs_have_activations_of_their_own(free: SimpleNamespace) -> None:
    logits = 2 * 256 * 347 * 4
    got = plan(model(), CUDA, torch.bfloat16)
    assert got.graph_bytes == 2048 * (3 * 64 + 12 * 16 + 3 * 96) * 2 + logits + (512 << 20)
    assert "CUDA graphs" in str(got) and "CUDA graphs" not in str(plan(model()))
    assert plan(model(), CUDA, torch.bfloat16, cuda_graphs=False).graph_bytes == plan(model()).graph_bytes == 0


def test_a_cpu_pool_holds_what_can_be_used_and_no_more(free: SimpleNamespace) -> None:
    assert plan(model(), max_num_seqs=3).num_kv_blocks == 3 * 512 // 16
    assert plan(model(), max_num_seqs=3, max_model_len=100).num_kv_blocks == 3 * 7
    big = plan(model("qwen3", **QWEN3))
    assert 0 <= 4 * GIB - big.kv_bytes < big.kv_bytes_per_block
    free.cpu = 8 * GIB
    half = plan(model("qwen3", **QWEN3))
    left = free.cpu - half.weights_bytes - half.activation_bytes
    assert 0 <= left // 2 - half.kv_bytes < half.kv_bytes_per_block


def test_the_length_is_cut_to_what_the_pool_holds(free: SimpleNamespace) -> None:
    assert plan(model()).max_model_len == 512
    assert plan(model(), num_kv_blocks=6).max_model_len == 96
    assert plan(model(), num_kv_blocks=6, block_size=8).max_model_len == 48
    assert plan(model(), max_model_len=100).max_model_len == 100
    free.cpu = 4 * GIB
    cut = plan(model("qwen3", **QWEN3))
    assert cut.max_model_len == cut.num_kv_blocks * 16 < 40960


def test_a_pool_smaller_than_the_length_that_was_asked_for_starts(free: SimpleNamespace) -> None:
    got = plan(model(), num_kv_blocks=4, max_model_len=256)
    assert (got.num_kv_blocks, got.max_model_len) == (4, 256)


def test_a_length_beyond_the_model(free: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 513.*512"):
        plan(model(), max_model_len=513)


@pytest.mark.parametrize(
    ("fields", "available"),
    [({}, GIB), ({"num_kv_blocks": 100_000}, 16 * GIB), ({"num_kv_blocks": 1}, 2 * GIB)],
)
def test_a_model_that_cannot_fit(fields: dict[str, Any], available: int, free: SimpleNamespace) -> None:
    free.cpu = available
    with pytest.raises(ModelError) as caught:
        plan(model("qwen3", **QWEN3), **fields)
    for word in ("weights (float32)", "2.2 GiB", "activations", "KV pool", f"{available / GIB:.1f} GiB are available"):
        assert word in str(caught.value)


def test_a_gpu_that_others_use(free: SimpleNamespace) -> None:
    free.gpu = (20 * GIB, 141 * GIB)
    got = plan(model("qwen3", **QWEN3), CUDA, torch.bfloat16)
    assert got.available_bytes == int(0.9 * 141 * GIB) - 121 * GIB
    free.gpu = (10 * GIB, 141 * GIB)
    with pytest.raises(ModelError, match="0 B are available"):
        plan(model("qwen3", **QWEN3), CUDA, torch.bfloat16)


def test_printed_in_a_few_aligned_lines(free: SimpleNamespace) -> None:
    lines = str(plan(model(), num_kv_blocks=32)).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["weights", "KV pool", "activations", "available"]
    assert "32 blocks of 16 tokens, 512 tokens" in lines[1] and "max_model_len 512" in lines[3]
    assert len({line.index("iB") for line in lines}) == 1


def test_sizes_and_counts_in_words(free: SimpleNamespace) -> None:
    sizes = (0, 1023, 1024, 1024**2 - 1, 5 * 1024**4, 3 * 1024**5, 10**25)
    assert [memory._readable(size) for size in sizes] == [
        "0 B", "1023 B", "1.0 KiB", "1.0 MiB", "5.0 TiB", "3.0 PiB", "8,673,617.4 EiB"
    ]  # fmt: skip
    assert "3 blocks of 1 token, 3 tokens" in str(plan(model(), block_size=1, num_kv_blocks=3))
    with pytest.raises(ModelError, match=r"lower num_kv_blocks, block_size, max_num_seqs"):
        plan(model(), block_size=10**9, num_kv_blocks=1)
