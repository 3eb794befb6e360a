"""Paged attention: keys and values live in fixed-size blocks, and a block table says which blocks are whose.

    sequence a, 37 tokens, blocks of 16        the pool of one layer
    block table [5, 0, 9]                      0     1     2     3     4     5     6     7     8     9    scratch
    positions 0-15 → block 5                   a16…  ·     b0…   ·     ·     a0…   ·     b16…  ·     a32…   ·
    positions 16-31 → block 0
    positions 32-36 → block 9                  slot of position p = block_table[p // B] * B + p % B

A step holds the sequences that decode (one token each) first, then the chunks of prompts:

    rows   0 … num_decodes-1 | chunk of c | chunk of d …

All decodes are one batched call. Query heads that share a key/value head are packed as rows of one small matrix
(grouped-query attention, arXiv:2305.13245), so that nothing is repeated in memory.

Letters: T tokens, S sequences, H query heads, K key/value heads, G = H/K, D head size, B block size, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import backend, cuda, decode_attention, prefill_attention
from labkit.kernels.attention_batch import AttentionBatch


def attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, window: int | None = None
) -> Tensor:
    """Stores the step's keys and values, then lets every token attend to those before it and itself.

    Args:
        q: [T, H, D]
        k, v: [T, K, D]
        k_cache, v_cache: [N, B, K, D], one layer's pool. Written at batch.slot_mapping.
        window: a token sees itself and the window - 1 tokens before it; None: all of them.

    Returns:
        [T, H, D]
    """
    store_kv(k, v, k_cache, v_cache, batch.slot_mapping)
    decodes = batch.num_decodes
    if not batch.chunks:
        return decode_attention.decode_attention(q, k_cache, v_cache, batch, window)
    parts = [decode_attention.decode_attention(q[:decodes], k_cache, v_cache, batch, window)] if decodes else []
    for chunk in batch.chunks:
        rows = slice(chunk.row, chunk.row + chunk.length)
        own = (k[rows], v[rows]) if chunk.start == 0 else None
        parts.append(prefill_attention.chunk_attention(q[rows], k_cache, v_cache, batch, chunk, window, own))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes keys and values [T, K, D] into the pool [N, B, K, D] at token slots [T], int64 (pools pass 2³¹)."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    window: int | None = None,
    split_size: int | None = None,
) -> Tensor:
    """`attention` by a GPU's kernels, for keys and values that are stored already.

    Decodes in one launch, all chunks of prompts in another.

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
    decode_attention.decode_attention_triton(
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
        prefill = cuda.flash_attention if backend.on_cuda() else prefill_attention.prefill_attention_triton
        prefill(q, k_cache, v_cache, batch.prompts, window, out=out)
        return out
    for chunk in batch.chunks:
        rows = slice(chunk.row, chunk.row + chunk.length)
        out[rows] = prefill_attention.chunk_attention(q[rows], k_cache, v_cache, batch, chunk, window)
    return out
