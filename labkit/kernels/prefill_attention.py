"""Attention of prompts: a chunk's tokens, the last ones of their sequence so far, see all before them and themselves.

The definition, `chunk_attention`, takes one chunk, gathers its blocks and calls PyTorch. Triton takes the chunks of
several sequences in one launch, and reads keys and values where they lie, in blocks:

    rows of the step     | c c c c c c c c c c | d d d d | e |        first_rows [0, 10, 14, 15]
    tiles (4 tokens)     |── 0 ──|── 1 ──|─ 2 ─|── 3 ────| 4 |        tiles: (chunk, first token), longest work first

A program takes one tile and one key/value head: its rows are tokens × the G query heads that share the keys, so that
keys are read once for all of them. It walks over the keys with the online softmax of FlashAttention (Dao et al. 2022,
arXiv:2205.14135); only tiles of keys that the diagonal or the window's edge cuts pay for a mask.

While a program computes exponentials, its tensor cores have nothing to do. So two programs have to fit on a
multiprocessor: that decides the size of tiles and the number of registers (`tiles.prefill_tile_for`).

Letters: T tokens, C chunks, H query heads, K key/value heads, G = H/K, D head size, B block size, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.kernels.attention_batch import AttentionBatch, PromptChunk, additive_mask, gather_blocks
from labkit.kernels.jit import jit, tl
from labkit.kernels.tiles import LOG2_E, PrefillTile, power_of_two

CPU_PIECE = 128  # queries that causal attention takes at once: 512 tokens cost 6.3 ms instead of 8.1


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
        own = (gather_blocks(k_cache, blocks)[:context], gather_blocks(v_cache, blocks)[:context])
    keys, values = own
    return causal_attention(q, keys, values, _chunk_mask(batch, chunk, keys.shape[0], window, q))


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
    return additive_mask(seen, dtype)


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


@dataclass(slots=True)
class Prompts:
    """The chunks of one step as the kernel wants them, all on the device; the same for every layer."""

    block_tables: Tensor  # [C, blocks of the longest] int32
    first_rows: Tensor  # [C + 1] int32: first row of each chunk in the step; the last is the end
    context_lens: Tensor  # [C] int32: tokens up to the chunk's end, itself included
    tiles: Tensor  # [2, tiles] int32 of `make_tiles`
    tile: PrefillTile


def make_prompts(
    tile: PrefillTile,
    group: int,
    rows: int,
    block_tables: Tensor,
    lengths: Tensor,
    context_lens: Tensor,
    decodes: int | Tensor = 0,
) -> Prompts:
    """Describes chunks to the kernel without asking the device for anything, so that a CUDA graph can hold it.

    Args:
        group: query heads for each key/value head
        rows: of the step. Those behind the last chunk are padding.
        block_tables: [C, W] int32
        lengths: [C] int: tokens of each chunk; 0 for a padded one
        context_lens: [C] int
        decodes: how many chunks, the first ones, are none of the kernel's
    """
    first_rows = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=first_rows[1:])
    tiles = make_tiles(first_rows, context_lens, tile.rows // group, rows, decodes)
    return Prompts(block_tables, first_rows, context_lens.int(), tiles, tile)


def make_tiles(first_rows: Tensor, context_lens: Tensor, tokens: int, rows: int, decodes: int | Tensor = 0) -> Tensor:
    """Cuts chunks into tiles: the longest chunk first, its last tile first, for that has the most keys.

    A long tile started last would be waited for. And what runs at one time belongs to few chunks, whose keys and
    values stay in the GPU's second cache while tile after tile reads them.

    Args:
        first_rows: [C + 1]
        tokens: of a tile
        rows: of the step, padding included; with C it bounds the number of tiles
        decodes: how many chunks, the first ones, get no tile

    Returns:
        [2, tiles] int32: chunk (-1: nothing to do), and the tile's first token within the chunk
    """
    chunks = len(context_lens)
    number = torch.arange(rows // tokens + chunks, device=context_lens.device)
    if chunks == 0:
        return number.new_empty(2, 0, dtype=torch.int32)
    longest = context_lens.argsort(descending=True)
    lengths = first_rows.diff().masked_fill(torch.arange(chunks, device=number.device) < decodes, 0)[longest]
    # The i-th longest chunk's tiles begin at number (tokens of those before it) // tokens + i: room for all of them.
    begins = (lengths.cumsum(0) - lengths) // tokens + torch.arange(chunks, device=number.device)
    i = torch.searchsorted(begins, number, right=True) - 1
    first = ((lengths[i] - 1) // tokens - number + begins[i]) * tokens
    return torch.stack((longest[i].masked_fill(first < 0, -1), first)).int()


def prefill_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prompts: Prompts,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Chunks of prompts against everything in their blocks; the chunks' own keys and values have been stored before.

    Args:
        q: [T, H, D], the step's rows; a head's numbers side by side, else strided
        k_cache, v_cache: [N, B, K, D], one layer's pool; with the same strides
        window: a token sees itself and the window - 1 tokens before it; None: all of them
        out: [T, H, D] to write into

    Returns:
        [T, H, D]; rows of no chunk are not written
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    tile = prompts.tile
    assert k_cache.stride() == v_cache.stride()
    if prompts.tiles.shape[1] == 0:
        return out
    prefill_kernel[(kv_heads, prompts.tiles.shape[1])](
        q, k_cache, v_cache, prompts.block_tables, prompts.first_rows, prompts.context_lens, prompts.tiles, out,
        head_dim**-0.5 * LOG2_E, *q.stride()[:2], *k_cache.stride()[:3],
        prompts.block_tables.stride(0), *out.stride()[:2],
        WINDOW=window or 0, ROWS=tile.rows, TILE=tile.tokens, D=head_dim, DP=max(16, power_of_two(head_dim)),
        B=k_cache.shape[1], G=heads // kv_heads, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
    )  # fmt: skip
    return out


# The tables' width changes from step to step; whether it is a multiple of 16 is not worth another compilation.
@jit(do_not_specialize=["tables_seq"])
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, rows_ptr, lens_ptr, tiles_ptr, out_ptr,
    scale, q_token, q_head, kv_block, kv_token, kv_head, tables_seq, out_token, out_head,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, B: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Grid (K, tiles)."""
    group = tl.program_id(0).to(tl.int64)
    chunk = tl.load(tiles_ptr + tl.program_id(1))
    if chunk < 0:
        return
    first = tl.load(tiles_ptr + tl.num_programs(1) + tl.program_id(1))
    first_row = tl.load(rows_ptr + chunk)
    length = tl.load(rows_ptr + chunk + 1) - first_row
    context = tl.load(lens_ptr + chunk)

    row = tl.arange(0, ROWS)
    token = first + row // G  # within the chunk
    head = group * G + row % G
    d = tl.arange(0, DP)
    wanted = ((row < ROWS // G * G) & (token < length))[:, None] & (d < D)[None, :]
    at = (first_row + token).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * q_token + head[:, None] * q_head + d[None, :], mask=wanted, other=0.0)
    position = context - length + token

    # Keys:  low  ─ the window cuts some rows ─  clear  ─ every row sees them all ─  diagonal  ─ cuts some ─  high
    lowest = context - length + first
    high = tl.minimum(lowest + ROWS // G, context)
    diagonal = lowest + 1
    low = 0
    clear = 0
    if WINDOW:
        low = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        clear = high - WINDOW

    table = tables_ptr + chunk.to(tl.int64) * tables_seq
    keys = k_ptr + group * kv_head
    values = v_ptr + group * kv_head
    best = tl.full([ROWS], -1.0e30, tl.float32)  # not -inf: a row that sees nothing of a tile would get -inf - -inf
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    stored = tl.minimum(low + tl.arange(0, TILE), high - 1)
    block = tl.load(table + stored // B)
    for start in range(low, high, TILE):
        key = start + tl.arange(0, TILE)
        kv_at = (block.to(tl.int64) * kv_block + stored % B * kv_token)[:, None] + d[None, :]  # pools pass 2³¹ numbers
        # One tile ahead, or each tile would wait for its table. Behind the end the last token is read once more, and
        # then hidden: cheaper than masking what is read.
        stored = tl.minimum(key + TILE, high - 1)
        block = tl.load(table + stored // B)
        if D == DP:
            k = tl.load(keys + kv_at)
            v = tl.load(values + kv_at)
        else:
            k = tl.load(keys + kv_at, mask=(d < D)[None, :], other=0.0)
            v = tl.load(values + kv_at, mask=(d < D)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if start + TILE > diagonal or start < clear:
            seen = key[None, :] <= position[:, None]
            if WINDOW:
                seen &= key[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = higher

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + at[:, None] * out_token + head[:, None] * out_head + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=wanted)
