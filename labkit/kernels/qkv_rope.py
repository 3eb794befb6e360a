"""Between the QKV product and attention: QK-norm, RoPE, and the new keys and values into their blocks, in one pass.

    qkv [T, (H + 2K) D]      q 0 … q H-1 │ k 0 … k K-1 │ v 0 … v K-1
                                  │             │             │
                              norm, turn    norm, turn        │        norm: only models that have one (Qwen3)
                                  ▼             ▼             ▼
                             q [T, H, D]     k_cache       v_cache     at the token's slot

Apart, these are five or six launches that read and write the same few bytes.

Letters: T tokens, H query heads, K key/value heads, D head size, B block size, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import attention, rms_norm, rope
from labkit.kernels.jit import jit, tl
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import power_of_two

HEADS = 8  # that a program takes: always as many, so that the sums of a norm keep their order


def norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """The definition, from the operations it is made of.

    Args:
        qkv: [T, (H + 2K) * D], all query heads, then keys, then values
        positions: [T] int
        cos_sin: [length, D] float32 of `rope.rope_table`
        k_cache, v_cache: [N, B, K, D], one layer's pool. Written at slot_mapping.
        slot_mapping: [T] int64: where each token goes, in tokens from the pool's start
        q_norm, k_norm: [D], weights of the norm of every query and key head; both or none

    Returns:
        Queries [T, H, D]
    """
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q = rms_norm.rms_norm(q, q_norm, eps)
        k = rms_norm.rms_norm(k, k_norm, eps)
    q, k = rope.apply_rope(q, k, positions, cos_sin)
    attention.store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q


def norm_rope_store_triton(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`norm_rope_store` in one launch."""
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    tokens = qkv.shape[0]
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    norm_rope_store_kernel[(tokens, -(-(heads + 2 * kv_heads) // HEADS))](
        qkv, positions, cos_sin, slot_mapping, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        q, k_cache, v_cache, eps, qkv.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        NORM=q_norm is not None and k_norm is not None, H=heads, K=kv_heads, D=head_dim, B=k_cache.shape[1],
        HEADS=HEADS, HALF=power_of_two(head_dim // 2), num_warps=4 if head_dim > 64 else 2,
        **dependent(qkv.device),
    )  # fmt: skip
    return q


@jit
def norm_rope_store_kernel(
    qkv_ptr, positions_ptr, cos_sin_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, q_ptr, k_ptr, v_ptr,
    eps, qkv_token, k_block, k_token, k_head, v_block, v_token, v_head,
    NORM: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, B: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of heads): the two halves of HEADS heads of one token, as two tiles [HEADS, D/2]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    inside = (d < D // 2)[None, :]
    there = (head < H + 2 * K)[:, None] & inside
    at = qkv_ptr + token * qkv_token + head[:, None] * D + d[None, :]
    raw_a = tl.load(at, mask=there, other=0.0)
    raw_b = tl.load(at + D // 2, mask=there, other=0.0)
    a = raw_a.to(tl.float32)
    b = raw_b.to(tl.float32)
    is_query = (head < H)[:, None]
    if NORM:
        mean_square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D
        scale = (1.0 / tl.sqrt(mean_square + eps))[:, None]
        weight_at = tl.where(is_query, q_norm_ptr + d[None, :], k_norm_ptr + d[None, :])
        # Rounded after each step, as the definition does it.
        a = (a * scale).to(raw_a.dtype).to(tl.float32) * tl.load(weight_at, mask=there, other=0.0).to(tl.float32)
        b = (b * scale).to(raw_a.dtype).to(tl.float32) * tl.load(weight_at + D // 2, mask=there, other=0.0).to(
            tl.float32
        )
        a = a.to(raw_a.dtype).to(tl.float32)
        b = b.to(raw_a.dtype).to(tl.float32)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * D + d, mask=d < D // 2, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * D + D // 2 + d, mask=d < D // 2, other=0.0)[None, :]
    turned_a = (a * cos - b * sin).to(raw_a.dtype)
    turned_b = (b * cos + a * sin).to(raw_a.dtype)

    queries = q_ptr + (token * H + head[:, None]) * D + d[None, :]
    tl.store(queries, turned_a, mask=is_query & inside)
    tl.store(queries + D // 2, turned_b, mask=is_query & inside)
    slot = tl.load(slots_ptr + token)  # int64
    is_key = ((head >= H) & (head < H + K))[:, None] & inside
    keys = k_ptr + slot // B * k_block + slot % B * k_token + (head - H)[:, None] * k_head + d[None, :]
    tl.store(keys, turned_a, mask=is_key)
    tl.store(keys + D // 2, turned_b, mask=is_key)
    is_value = ((head >= H + K) & (head < H + 2 * K))[:, None] & inside
    values = v_ptr + slot // B * v_block + slot % B * v_token + (head - H - K)[:, None] * v_head + d[None, :]
    tl.store(values, raw_a, mask=is_value)
    tl.store(values + D // 2, raw_b, mask=is_value)
