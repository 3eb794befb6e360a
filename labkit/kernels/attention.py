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

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.kernels import backend, native
from labkit.kernels.prefill_attention import Prompts

CPU_PIECE = 128  # queries that causal attention takes at once: 512 tokens cost 6.3 ms instead of 8.1
DECODES = -1  # in place of a chunk's first row, for the mask of all decodes


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
        return decode_attention(q, k_cache, v_cache, batch, window)
    parts = [decode_attention(q[:decodes], k_cache, v_cache, batch, window)] if decodes else []
    for chunk in batch.chunks:
        rows = slice(chunk.row, chunk.row + chunk.length)
        own = (k[rows], v[rows]) if chunk.start == 0 else None
        parts.append(chunk_attention(q[rows], k_cache, v_cache, batch, chunk, window, own))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def chunk_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    chunk: PromptChunk,
    window: int | None = None,
    own: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One chunk's tokens against everything in its blocks, which must hold the chunk's own keys and values already.

    Args:
        q: [T, H, D], the chunk's rows
        own: the chunk's keys and values [T, K, D], if they are at hand and there is nothing before them

    Returns:
        [T, H, D]
    """
    if own is None:
        # With a window, the blocks that even the chunk's first token cannot see are not read.
        first = 0 if window is None else max(0, chunk.start - window + 1) // k_cache.shape[1]
        context = chunk.start + chunk.length - first * k_cache.shape[1]
        blocks = chunk.block_table[first:]
        own = (_gather(k_cache, blocks)[:context], _gather(v_cache, blocks)[:context])
    keys, values = own
    return causal_attention(q, keys, values, _chunk_mask(batch, chunk, keys.shape[0], window, q))


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes keys and values [T, K, D] into the pool [N, B, K, D] at token slots [T], int64 (pools pass 2³¹)."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, window: int | None = None
) -> Tensor:
    """One token for each sequence against everything in its blocks; q and the result are [S, H, D]."""
    if backend.on_cpp(q, k_cache):
        return native.decode_attention(q, k_cache, v_cache, batch.block_tables, batch.context_lens, window)
    sequences, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    padded = batch.block_tables.shape[1] * k_cache.shape[1]
    context = batch.max_context
    blocks = batch.block_tables.flatten()
    keys, values = (
        _gather(cache, blocks).view(sequences, padded, kv_heads, head_dim)[:, :context] for cache in (k_cache, v_cache)
    )
    out = scaled_dot_product_attention(
        q.view(sequences, kv_heads, heads // kv_heads, head_dim),  # [S, K, G, D]
        keys.transpose(1, 2),  # [S, K, context, D]
        values.transpose(1, 2),
        attn_mask=_decode_mask(batch, window, q),
    )
    return out.reshape(sequences, heads, head_dim)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of the last T of N tokens: dense keys and values, no blocks.

    Args:
        q: [T, H, D], the tokens at positions N - T … N - 1
        k, v: [N, K, D]
        mask: [T, N] of `causal_mask`; None: each token sees itself and all before it, and T = N.

    Returns:
        [T, H, D]
    """
    length, context = q.shape[0], k.shape[0]
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, H or K, T or N, D]
    grouped = q.shape[1] != k.shape[1]
    if mask is None:
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
        return out.squeeze(0).transpose(0, 1)
    # PyTorch's CPU kernel computes what a mask hides. Piece by piece, most of it is not even offered.
    piece = CPU_PIECE if q.device.type == "cpu" else length
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin in range(0, length, piece):
        end = min(begin + piece, length)
        seen = context - length + end
        attended = scaled_dot_product_attention(
            queries[:, :, begin:end],
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=mask[begin:end, :seen],
            enable_gqa=grouped,
        )
        out[begin:end] = attended.squeeze(0).transpose(0, 1)
    return out


def causal_mask(length: int, context: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T, N] to add to scores: 0 where one of the last T of N tokens may look, -inf behind it and before its window."""
    position = torch.arange(context - length, context, device=device).unsqueeze(1)  # [T, 1]
    key = torch.arange(context, device=device)
    seen = key <= position
    if window is not None:
        seen &= key > position - window
    return _additive(seen, dtype)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """Copies blocks [n] out of a pool [N, B, K, D] into [n * B, K, D]."""
    return cache.index_select(0, blocks).flatten(0, 1)


def _chunk_mask(
    batch: AttentionBatch, chunk: PromptChunk, context: int, window: int | None, q: Tensor
) -> Tensor | None:
    """The mask of one chunk against the `context` keys it is given; None where plain causal attention is fastest."""
    limited = window if window is not None and window < context else None
    if limited is None and context == chunk.length and (q.device.type != "cpu" or chunk.length <= CPU_PIECE):
        return None
    key = (chunk.row, limited)
    if key not in batch.masks:
        batch.masks[key] = causal_mask(chunk.length, context, limited, q.dtype, q.device)
    return batch.masks[key]


def _decode_mask(batch: AttentionBatch, window: int | None, q: Tensor) -> Tensor | None:
    """[S, 1, 1, context]: 0 where a sequence may look, -inf behind its end and before its window."""
    limited = window if window is not None and window < batch.max_context else None
    if q.shape[0] == 1 and limited is None:
        return None  # nobody is padded
    key = (DECODES, limited)
    if key not in batch.masks:
        position = torch.arange(batch.max_context, device=q.device)
        length = batch.context_lens.unsqueeze(1)  # [S, 1]
        seen = position < length
        if limited is not None:
            seen &= position >= length - limited
        batch.masks[key] = _additive(seen, q.dtype)[:, None, None, :]
    return batch.masks[key]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 for True, -inf for False. PyTorch's CPU kernel is faster with numbers than with booleans."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
