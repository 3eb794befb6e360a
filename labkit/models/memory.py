"""How memory is shared between weights, KV pool and activations, worked out before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from labkit.config import GRAPH_TOKENS, EngineConfig, ModelConfig
from labkit.errors import ModelError, counted
from labkit.models.weights import num_parameters

# A CPU pool grows no larger than this unless num_kv_blocks asks for it: memory there is also everybody else's.
CPU_POOL_BYTES = 4 << 30
CPU_POOL_SHARE = 0.5
GRAPH_BYTES = 512 << 20  # what CUDA keeps for the graphs themselves; they are recorded when they are needed


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, and what they buy. Printed before loading."""

    weights_bytes: int
    kv_bytes_per_block: int
    num_kv_blocks: int
    kv_bytes: int
    activation_bytes: int
    graph_bytes: int
    available_bytes: int
    max_model_len: int
    block_size: int

    def __str__(self) -> str:
        tokens = self.num_kv_blocks * self.block_size
        block = counted(self.block_size, "token")
        pool = f"{counted(self.num_kv_blocks, 'block')} of {block}, {counted(tokens, 'token')}"
        rows = [
            ("weights", self.weights_bytes, ""),
            ("KV pool", self.kv_bytes, pool),
            ("activations", self.activation_bytes, "at most, in one step"),
            *([("CUDA graphs", self.graph_bytes, "when all sizes are recorded")] if self.graph_bytes else []),
            ("available", self.available_bytes, f"max_model_len {self.max_model_len:,}"),
        ]
        return "\n".join(f"{name:<12}{_readable(size):>11}  {note}".rstrip() for name, size, note in rows)


def plan_memory(config: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype) -> MemoryPlan:
    """Size the KV pool, and the model's length with it.

    Raises:
        ValueError: max_model_len is over what the model was made for.
        ModelError: the model cannot fit, with all the numbers.
    """
    model_len = config.max_position_embeddings
    if engine.max_model_len is not None:
        if engine.max_model_len > model_len:
            raise ValueError(
                f"max_model_len is {engine.max_model_len}; this model has max_position_embeddings {model_len}, "
                "and positions beyond that mean nothing to it"
            )
        model_len = engine.max_model_len
    weights = num_parameters(config) * dtype.itemsize
    activations = activation_bytes(config, engine, device, dtype)
    per_block = kv_bytes_per_block(config, engine.block_size, dtype)
    available = available_bytes(device, engine.gpu_memory_utilization)
    graphs = graph_bytes(config, engine, device, dtype)
    left = available - weights - activations - graphs
    if engine.num_kv_blocks is not None:
        blocks = engine.num_kv_blocks
    else:
        if device.type == "cpu":
            left = min(left, CPU_POOL_BYTES, int(left * CPU_POOL_SHARE))
        needed = engine.max_num_seqs * -(-model_len // engine.block_size)
        # A GPU's memory is this process's to fill: the more blocks, the longer prefixes stay cached.
        blocks = left // per_block if device.type != "cpu" else min(needed, left // per_block)
    if blocks < 1 or weights + activations + graphs + blocks * per_block > available:
        raise _cannot_fit(weights, activations + graphs, max(blocks, 1) * per_block, available, device, dtype)
    if engine.max_model_len is None:
        model_len = min(model_len, blocks * engine.block_size)
    return MemoryPlan(
        weights_bytes=weights,
        kv_bytes_per_block=per_block,
        num_kv_blocks=blocks,
        kv_bytes=blocks * per_block,
        activation_bytes=activations,
        graph_bytes=graphs,
        available_bytes=available,
        max_model_len=model_len,
        block_size=engine.block_size,
    )


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of `block_size` tokens in all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def activation_bytes(config: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """The most that one step holds beside weights and KV.

    For each token of the step: three hidden states (residual, normed, output), queries with keys and values, the
    attention output, gate and up rows and their product. For each row that is sampled: the logits in float32 and a
    second copy for the filters.
    """
    tokens = engine.max_num_batched_tokens or (512 if device.type == "cpu" else 8192)
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 3 * config.hidden_size + heads + 3 * config.intermediate_size
    sampled = min(engine.max_num_seqs, tokens)
    return tokens * per_token * dtype.itemsize + 2 * sampled * config.vocab_size * 4


def graph_bytes(config: ModelConfig, engine: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """What CUDA graphs hold beside that: their own activations, once for all of them, and themselves."""
    if device.type != "cuda" or not engine.cuda_graphs:
        return 0
    return activation_bytes(config, engine.replace(max_num_batched_tokens=GRAPH_TOKENS), device, dtype) + GRAPH_BYTES


def available_bytes(device: torch.device, share: float) -> int:
    """CPU: what the system can give without swapping. CUDA: `share` of the card, less what others hold there."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(share * total) - (total - free))


def _cannot_fit(
    weights: int, activations: int, pool: int, available: int, device: torch.device, dtype: torch.dtype
) -> ModelError:
    name = str(dtype).removeprefix("torch.")
    total = weights + activations + pool
    return ModelError(
        f"the model does not fit on {device}: {_readable(weights)} weights ({name}) + {_readable(activations)} "
        f"activations + {_readable(pool)} KV pool = {_readable(total)}, and {_readable(available)} are available; "
        "take a smaller model, a 16-bit dtype, or lower num_kv_blocks, block_size, max_num_seqs or "
        "max_num_batched_tokens"
    )


def _readable(size: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if value < 1023.95 or unit == "EiB":  # 1023.96 would be written 1024.0
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
