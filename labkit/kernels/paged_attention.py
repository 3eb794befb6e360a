"""Attention of a whole step on a GPU: `attention.attention` for keys and values that are stored already."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import attention, backend, cuda, decode_attention, prefill_attention
from labkit.kernels.attention import AttentionBatch


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    window: int | None = None,
    split_size: int | None = None,
) -> Tensor:
    """Decodes in one launch, all chunks of prompts in another.

    Without tensor cores for tl.dot there are no `batch.prompts`; chunks then go to PyTorch one by one.

    Args:
        q: [T, H, D]
        k_cache, v_cache: [N, B, K, D], one layer's pool. The step's own keys and values are in it.
        window: a token sees itself and the window - 1 tokens before it; None: all of them
        split_size: of decode_attention, for results that do not depend on who else is in the batch

    Returns:
        [T, H, D]
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    decodes = batch.num_decodes
    decode_attention.decode_attention(
        q[:decodes],
        k_cache,
        v_cache,
        batch.block_tables,
        batch.context_lens,
        batch.max_context,
        window,
        split_size,
        out=out[:decodes],
    )
    if batch.prompts is not None:
        prefill = cuda.flash_attention if backend.on_cuda() else prefill_attention.prefill_attention
        prefill(q, k_cache, v_cache, batch.prompts, window, out=out)
        return out
    for chunk in batch.chunks:
        rows = slice(chunk.row, chunk.row + chunk.length)
        out[rows] = attention.chunk_attention(q[rows], k_cache, v_cache, batch, chunk, window)
    return out
