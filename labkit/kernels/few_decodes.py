"""QK-norm, RoPE, KV store and attention of a few decodes, in one kernel of CUDA C++ (csrc/few_decodes.cu).

Its definition is the two operations that it stands for, one after the other:

    q   = qkv_rope.norm_rope_store(qkv, …)
    out = decode_attention.decode_attention(q, k_cache, v_cache, …)

Letters: S sequences, H query heads, K key/value heads, G = H/K, D head size, B block size, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import backend, cuda
from labkit.kernels.attention_batch import AttentionBatch

MOST = 8  # sequences; of more, two kernels of Triton's are faster
MAX_GROUP = 8  # query heads of a key/value head: half the rows of a product on tensor cores
BLOCKS = 264 * 128  # blocks × head size that all sequences and heads share: two for each of 132 multiprocessors
MAX_CLUSTER = 8  # blocks of one sequence and head; more are not promised by every GPU


def takes_few_decodes(qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> bool:
    """Whether `few_decodes` can compute this step, as `norm_rope_store` and `decode_attention` would get it."""
    sequences = batch.num_decodes
    if not backend.few_rows_on_cuda() or not 1 <= sequences <= MOST or qkv.shape[0] != sequences:
        return False
    _, _, kv_heads, head_dim = k_cache.shape
    group = qkv.shape[1] // head_dim // kv_heads - 2
    pieces = (qkv.stride(0), *k_cache.stride()[:3])
    return (
        qkv.device.type == "cuda"
        and torch.cuda.get_device_capability(qkv.device) >= cuda.HOPPER
        and qkv.dtype in (torch.float16, torch.bfloat16)
        and k_cache.dtype == v_cache.dtype == qkv.dtype
        and head_dim in cuda.HEAD_DIMS
        and group <= MAX_GROUP
        and k_cache.stride() == v_cache.stride()
        and k_cache.stride(3) == qkv.stride(1) == 1
        and all(step % 8 == 0 for step in pieces)
        and all(tensor.data_ptr() % 16 == 0 for tensor in (qkv, k_cache, v_cache))
        and batch.block_tables.stride(1) == 1
        and all(tensor.dtype == torch.int32 for tensor in (positions, batch.block_tables, batch.context_lens))
    )


def few_decodes(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    window: int | None = None,
    cluster: int | None = None,
) -> Tensor:
    """Stores each sequence's new key and value, then lets its new token attend to all it has.

    What is read before the kernel in front has ended must have been written before that one began: keys and values of
    earlier tokens, `batch`, `positions` and weights. In a step an operation of PyTorch's, the embedding, lies between.

    Args:
        qkv: [S, (H + 2K) * D], all query heads, then keys, then values; `takes_few_decodes` says yes to it
        positions: [S] int32
        cos_sin: [length, D] float32 of `rope.rope_table`
        k_cache, v_cache: [N, B, K, D], one layer's pool. Written at batch.slot_mapping, where the tables have the
            sequences' last tokens.
        batch: S decodes and no prompts; a sequence of 0 tokens (a padded row) gives zeros and stores nothing
        q_norm, k_norm: [D], weights of the norm of every query and key head; both or none
        window: a token sees itself and the window - 1 tokens before it; None: all of them
        cluster: blocks that share a sequence and a head, a power of two; for measuring. None: the best known

    Returns:
        [S, H, D]
    """
    sequences = batch.num_decodes
    _, block_size, kv_heads, head_dim = k_cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    out = torch.empty(sequences, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    norms = [None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm)]
    tensors = (cos_sin, positions, batch.slot_mapping, batch.block_tables, batch.context_lens, k_cache, v_cache, out)
    steps = (qkv.stride(0), batch.block_tables.stride(0), *k_cache.stride()[:3])
    if cluster is None:
        cluster = min(MAX_CLUSTER, 1 << (max(1, BLOCKS // (head_dim * sequences * kv_heads)).bit_length() - 1))
    sizes = (sequences, kv_heads, heads // kv_heads, head_dim, block_size, window or 0)
    cuda.call(
        "labkit_few_decodes", qkv.device, qkv.data_ptr(), *norms, *[tensor.data_ptr() for tensor in tensors],
        (cuda.SIZE * len(steps))(*steps), *sizes, eps, cluster, qkv.dtype == torch.bfloat16,
    )  # fmt: skip
    return out
