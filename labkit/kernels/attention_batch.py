"""What a step's attention is told: who decodes, which chunks of prompts there are, and where their blocks lie.

Letters: T tokens, S sequences, K key/value heads, D head size, B block size, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from labkit.kernels.prefill_attention import Prompts


@dataclass(slots=True)
class PromptChunk:
    """Positions start … start + length - 1 of one sequence, in `length` consecutive rows of the step."""

    row: int
    start: int
    length: int
    block_table: Tensor  # [blocks that hold start + length tokens] int


@dataclass(slots=True)
class AttentionBatch:
    """Who attends to what in one step; the same for every layer."""

    slot_mapping: Tensor  # [T] int64: where each token's key and value go, in tokens from the pool's start
    block_tables: Tensor  # [num_decodes, blocks of the longest] int; shorter ones are padded with any block
    context_lens: Tensor  # [num_decodes] int: tokens each decode sees, itself included
    max_context: int  # the largest of them; known to the host, so that nothing waits for the device
    chunks: list[PromptChunk] = field(default_factory=list)
    prompts: Prompts | None = None  # the chunks once more, where a kernel takes all of them at once
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)  # (first row, window): made when needed

    @property
    def num_decodes(self) -> int:
        return self.block_tables.shape[0]


def gather_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """Copies blocks [n] out of a pool [N, B, K, D] into [n * B, K, D]."""
    return cache.index_select(0, blocks).flatten(0, 1)


def additive_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for True, -inf for False. PyTorch's CPU kernel is faster with numbers than with booleans."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
