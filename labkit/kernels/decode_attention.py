"""Attention of one new token a sequence.

For every sequence s,

    keys, values = the first context_lens[s] tokens (the last `window` of them) of the blocks in block_tables[s]
    out[s]       = softmax(q[s] keysᵀ / √D) values

The definition gathers the blocks and calls PyTorch; C++ (csrc/decode_attention.cpp) and Triton read them where they
lie. The time goes into reading keys and values once, so the Triton kernel is about keeping enough reads in flight:

- A program takes one sequence, one key/value head and all G query heads that share it, packed as rows of one tile. So
  keys and values are read once, not G times, and a tl.dot has 16 rows, of which G are in use.
- Few sequences would leave most of a GPU idle. Then a context is cut into splits, one program each (flash-decoding,
  Dao et al. 2023). Each counts itself when it is done, and the one that is last merges them by their log-sum-exp:

      context of s   |───── split 0 ─────|───── split 1 ─────|─ split 2 ─|      split 3: nothing left, ends at once
                      out 0, lse 0         out 1, lse 1        out 2, lse 2  ──merge──▶ Σ 2^(lse i - lse) out i

  That saves the launch of a second kernel. Whichever is last, the order of the sum is that of the splits, so that
  results repeat bit for bit.

  The number of splits comes from what the host knows (S, K and a bound on the context), their lengths from
  context_lens on the device. So a CUDA graph captured once serves every context. Splits of a fixed length
  (`split_size`) make a sequence's result independent of its neighbours, bit for bit: its own length decides.
- On GPUs without tensor cores for tl.dot (Turing) the same kernel multiplies and sums instead (`DOT` false).

Letters: S sequences, H query heads, K key/value heads, G = H/K, D head size, B block size, N blocks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.kernels import backend, native
from labkit.kernels.attention_batch import AttentionBatch, additive_mask, gather_blocks
from labkit.kernels.jit import jit, tl
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import LOG2_E, DecodeTile, decode_tile, power_of_two

DECODES = -1  # in place of a chunk's first row, for the mask of all decodes
FEW = 256  # sequences × key/value heads that are few programs for a GPU
PROGRAMS = 1024  # of one warp each, that fill a GPU of 132 multiprocessors
MAX_SPLITS = 64
MERGE = 4096  # numbers of partial results that are merged at once


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
        gather_blocks(cache, blocks).view(sequences, padded, kv_heads, head_dim)[:, :context]
        for cache in (k_cache, v_cache)
    )
    out = scaled_dot_product_attention(
        q.view(sequences, kv_heads, heads // kv_heads, head_dim),  # [S, K, G, D]
        keys.transpose(1, 2),  # [S, K, context, D]
        values.transpose(1, 2),
        attn_mask=_decode_mask(batch, window, q),
    )
    return out.reshape(sequences, heads, head_dim)


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
        batch.masks[key] = additive_mask(seen, q.dtype)[:, None, None, :]
    return batch.masks[key]


def decode_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context: int,
    window: int | None = None,
    split_size: int | None = None,
    out: Tensor | None = None,
    tile: DecodeTile | None = None,
    splits: int | None = None,
) -> Tensor:
    """`decode_attention` for a GPU.

    Args:
        q: [S, H, D]; a head's numbers side by side, anything else may be strided
        k_cache, v_cache: [N, B, K, D], one layer's pool
        block_tables: [S, at least ceil(context / B)] int32
        context_lens: [S] int32; 0 (a padded row) gives zeros
        max_context: a bound on context_lens that the host knows. Too low or too high costs time, not correctness.
        window: a token sees itself and the window - 1 tokens before it; None: all of them
        split_size: tokens a split; None: whatever is fastest for this many sequences
        out: [S, H, D] to write into
        tile, splits: for measuring; None: the best known

    Returns:
        [S, H, D]
    """
    sequences, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if sequences == 0:
        return out
    seen = max_context if window is None else min(max_context, window)
    if splits is None:
        # A power of two: few variants to compile.
        splits = power_of_two(-(-seen // split_size)) if split_size else num_splits(sequences, kv_heads, seen)
    if tile is None:
        tile = decode_tile(q, heads // kv_heads, few=split_size is None and sequences * kv_heads <= FEW)
    row_blocks = -(-(heads // kv_heads) // tile.rows)
    width = max(16, power_of_two(head_dim))
    # With one split `out` stands in for the three arrays that are not needed.
    partial, lse, arrived = out, out, out
    if splits > 1:
        partial = torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
        arrived = _counters(q.device, power_of_two(sequences * kv_heads * row_blocks))
    merged = min(tile.rows, power_of_two(heads // kv_heads))
    decode_kernel[(kv_heads * row_blocks, sequences, splits)](
        q, k_cache, v_cache, block_tables, context_lens, out, partial, lse, arrived,
        head_dim**-0.5 * LOG2_E, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        block_tables.stride(0), *out.stride()[:2],
        WINDOW=window or 0, SPLIT=split_size or 0, SPLITS=splits, TILE=tile.tokens, D=head_dim, DP=width,
        B=k_cache.shape[1], G=heads // kv_heads, ROWS=tile.rows, ROW_BLOCKS=row_blocks, DOT=tile.dot,
        MERGED=merged, MERGE=max(1, MERGE // (merged * width)),
        num_warps=tile.warps, num_stages=tile.stages, **dependent(q.device),
    )  # fmt: skip
    return out


@functools.cache
def _counters(device: torch.device, size: int) -> Tensor:
    """Zeros that every launch leaves as zeros. Launches share them, so they must run one after the other."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def num_splits(sequences: int, kv_heads: int, context: int) -> int:
    """Into how many parts a context is cut, so that all programs together fill the GPU; a power of two.

    Empty splits end at once, so a bound far above the real context costs little. Up to 16 of 32 tokens are cheap to
    merge; more are only made of 64 tokens and longer.
    """
    if sequences * kv_heads > FEW:
        return 1
    to_fill = PROGRAMS // (sequences * kv_heads)
    most = max(16, power_of_two(context // 64))
    return min(1 << (to_fill.bit_length() - 1), power_of_two(-(-context // 32)), most, MAX_SPLITS)


@jit
def _split_length(tokens, SPLIT: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Tokens of each split of a sequence of which `tokens` are seen: fixed, or a share in whole tiles."""
    if SPLIT:
        # A bound that was too low leaves more than SPLITS × SPLIT tokens.
        return tl.maximum(SPLIT, tl.cdiv(tokens, SPLITS))
    return tl.cdiv(tl.cdiv(tokens, SPLITS), TILE) * TILE


# The tables' width changes from step to step; whether it is a multiple of 16 is not worth another compilation.
@jit(do_not_specialize=["tables_seq"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr,
    scale, q_seq, q_head, k_block, k_token, k_head, v_block, v_token, v_head, tables_seq, out_seq, out_head,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, B: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    DOT: tl.constexpr, MERGED: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (K × blocks of query heads, S, splits): heads first, because they read neighbouring bytes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head = (tl.program_id(0) // ROW_BLOCKS).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first_row = tl.program_id(0) % ROW_BLOCKS * ROWS  # of the G query heads
    row = first_row + tl.arange(0, ROWS)
    head = kv_head * G + row
    d = tl.arange(0, DP)
    wanted = (row < G)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + seq * q_seq + head[:, None] * q_head + d[None, :], mask=wanted, other=0.0)

    context = tl.load(lens_ptr + seq)
    lowest = tl.maximum(context - WINDOW, 0) if WINDOW else 0
    length = _split_length(context - lowest, SPLIT, SPLITS, TILE)
    used = tl.cdiv(context - lowest, tl.maximum(length, 1)) if SPLITS > 1 else 1
    if SPLITS > 1 and split >= tl.maximum(used, 1):
        return  # nothing left; the first also writes the zeros of an empty context
    begin = lowest + split * length
    end = tl.minimum(begin + length, context)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        inside = token < end
        block = tl.load(tables_ptr + seq * tables_seq + token // B, mask=inside, other=0).to(tl.int64)  # pools pass 2³¹
        there = inside[:, None] & (d < D)[None, :]
        k_at = block * k_block + (token % B) * k_token + kv_head * k_head
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=there, other=0.0)
        v_at = block * v_block + (token % B) * v_token + kv_head * v_head
        v = tl.load(v_ptr + v_at[:, None] + d[None, :], mask=there, other=0.0)
        if DOT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.sum(q[:, None, :].to(tl.float32) * k[None, :, :].to(tl.float32), axis=2)
        scores = tl.where(inside[None, :], scores * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))  # finite: a tile has at least one token inside
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        if DOT:
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :].to(tl.float32), axis=1)
        best = higher

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if used > 1:
        first_head = (seq * (tl.num_programs(0) // ROW_BLOCKS) + kv_head) * G
        part = (first_head + row) * SPLITS + split
        tl.store(partial_ptr + part[:, None] * D + d[None, :], acc, mask=wanted)
        tl.store(lse_ptr + part, best + tl.log2(total), mask=row < G)
        tl.debug_barrier()  # written by all threads before it is counted
        arrived = arrived_ptr + seq * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrived, 1, sem="acq_rel") < used - 1:
            return
        tl.store(arrived, 0)  # for the next launch
        outs = out_ptr + seq * out_seq + kv_head * G * out_head
        _merge(
            partial_ptr, lse_ptr, first_head, first_row, used, outs, out_head, SPLITS, G, D, DP, MERGED, MERGE,
        )  # fmt: skip
        return
    out_at = out_ptr + seq * out_seq + head[:, None] * out_head + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=wanted)


@jit
def _merge(
    partial_ptr, lse_ptr, first_head, first_row, used, out_ptr, out_head, SPLITS: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, MERGED: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The `used` splits of MERGED query heads of a group; always MERGE at a time, so that sums keep their order."""
    row = first_row + tl.arange(0, MERGED)
    d = tl.arange(0, DP)
    best = tl.full([MERGED], -1.0e30, tl.float32)
    total = tl.zeros([MERGED], tl.float32)
    acc = tl.zeros([MERGED, DP], tl.float32)
    for start in range(0, used, MERGE):
        split = start + tl.arange(0, MERGE)
        part = (first_head + row)[None, :] * SPLITS + split[:, None]
        there = (split < used)[:, None] & (row < G)[None, :]
        # Other multiprocessors have written these: past the first cache, which does not see that (".cg").
        lse = tl.load(lse_ptr + part, mask=there, other=-float("inf"), cache_modifier=".cg")
        partial_at = partial_ptr + part[:, :, None] * D + d[None, None, :]
        partial = tl.load(partial_at, mask=there[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(best, tl.max(lse, axis=0))
        weights = tl.exp2(lse - higher[None, :])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weights, axis=0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * partial, axis=0)
        best = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + row[:, None] * out_head + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(row < G)[:, None] & (d < D)[None, :])
