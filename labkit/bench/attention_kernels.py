"""Attention's rows of `labkit bench kernels`, at the shape of Qwen3-0.6B: 16 query heads, 8 of keys and values, D 128.

Decoding is bound by memory: what counts is GB/s against the keys and values that must be read. A long prompt is bound
by arithmetic: there the time stands beside PyTorch's best scaled_dot_product_attention on dense tensors, which have no
blocks to look up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from labkit.bench.kernels import CACHE_BYTES, KernelRow, in_turn, median_us
from labkit.kernels import cuda, decode_attention, few_decodes, prefill_attention, qkv_rope
from labkit.kernels.attention_batch import AttentionBatch
from labkit.kernels.tiles import CUDA_TILE, prefill_tile

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 16, 8, 128, 16
DTYPE = torch.bfloat16
MAX_SETS = 64
DECODES = [(256, 800), (64, 400), (8, 400), (1, 400), (1, 16384)]  # sequences, tokens of each
PROMPTS = [(8, 2048), (32, 512), (1, 8192)]
TOKENS = [8192, 256, 1]  # of QK-norm, RoPE and KV store
FEW = "QK-norm, RoPE, store, attention, CUDA C++"
SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def attention_rows(device: torch.device, copied: float, in_cuda: bool) -> Iterator[KernelRow]:
    """Measures all of them; `copied` is the bandwidth of a copy in bytes a second, in_cuda: also CUDA C++'s."""
    for sequences, context in DECODES:
        yield decode_row(device, copied, sequences, context)
        if in_cuda and sequences <= few_decodes.MOST and torch.cuda.get_device_capability(device) >= cuda.HOPPER:
            yield few_decodes_row(device, copied, sequences, context)
    for sequences, length in PROMPTS:
        yield from prefill_rows(device, copied, sequences, length, in_cuda)
    for tokens in TOKENS:
        yield store_row(device, copied, tokens)


def row(
    copied: float, op: str, shape: str, size: int, us: float, reference_us: float, reference: str, flops: int = 0
) -> KernelRow:
    rate = size / (us * 1e-6)
    dtype = str(DTYPE).removeprefix("torch.")
    return KernelRow(op, shape, dtype, size, us, reference_us, reference, rate / 1e9, rate / copied, flops)


class Decodes:
    """Sequences of `context` tokens: several sets of them, whose blocks lie scattered over one pool."""

    def __init__(self, device: torch.device, sequences: int, context: int):
        width = -(-context // BLOCK)
        self.shape = f"{sequences} x {context}"
        self.kv_bytes = 2 * sequences * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        sets = max(1, min(MAX_SETS, math.ceil(CACHE_BYTES / self.kv_bytes)))
        self.k, self.v = _pool(sets * sequences * width, device)
        self.tables = torch.randperm(sets * sequences * width, device=device).int().view(sets, sequences, width)
        self.lens = torch.full((sequences,), context, dtype=torch.int32, device=device)


def decode_row(device: torch.device, copied: float, sequences: int, context: int) -> KernelRow:
    """Attention alone."""
    decodes = Decodes(device, sequences, context)
    k, v, lens = decodes.k, decodes.v, decodes.lens
    inputs: list[tuple[Tensor, ...]] = [(_normal(device, sequences, HEADS, HEAD_DIM), one) for one in decodes.tables]

    def ours(q: Tensor, table: Tensor) -> Tensor:
        return decode_attention.decode_attention_triton(q, k, v, table, lens, context)

    def reference(q: Tensor, table: Tensor) -> Tensor:
        return decode_attention.decode_attention(q, k, v, AttentionBatch(lens, table, lens, context))

    size = decodes.kv_bytes + 2 * inputs[0][0].nbytes + decodes.tables[0].nbytes
    us, reference_us = in_turn(ours, inputs), in_turn(reference, inputs[:4])
    return row(copied, "decode attention", decodes.shape, size, us, reference_us, "gather + SDPA")


def few_decodes_row(device: torch.device, copied: float, sequences: int, context: int) -> KernelRow:
    """Everything between the QKV product and the next one, in one kernel, beside the two of Triton's."""
    decodes = Decodes(device, sequences, context)
    k, v, lens = decodes.k, decodes.v, decodes.lens
    q_norm, k_norm = _normal(device, 2, HEAD_DIM).unbind()
    table, positions = torch.randn(context, HEAD_DIM, device=device), lens - 1
    slots = decodes.tables[..., -1].long() * BLOCK + (context - 1) % BLOCK
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    inputs: list[tuple[Tensor, ...]] = [
        (_normal(device, sequences, width), *one) for one in zip(decodes.tables, slots, strict=True)
    ]

    def ours(qkv: Tensor, blocks: Tensor, slot: Tensor) -> Tensor:
        batch = AttentionBatch(slot, blocks, lens, context)
        return few_decodes.few_decodes(qkv, positions, table, k, v, batch, q_norm, k_norm)

    def two(qkv: Tensor, blocks: Tensor, slot: Tensor) -> Tensor:
        q = qkv_rope.norm_rope_store_triton(qkv, positions, table, k, v, slot, q_norm, k_norm)
        return decode_attention.decode_attention_triton(q, k, v, blocks, lens, context)

    us, reference_us = in_turn(ours, inputs), in_turn(two, inputs)
    size = decodes.kv_bytes + 2 * inputs[0][0].nbytes + decodes.tables[0].nbytes
    return row(copied, FEW, decodes.shape, size, us, reference_us, "two kernels of Triton's")


def prefill_rows(
    device: torch.device, copied: float, sequences: int, length: int, in_cuda: bool
) -> Iterator[KernelRow]:
    """Whole prompts, causal."""
    width, rows, group = length // BLOCK, sequences * length, HEADS // KV_HEADS
    k, v = _pool(sequences * width, device)
    q = _normal(device, rows, HEADS, HEAD_DIM)
    tables = torch.randperm(sequences * width, device=device).int().view(sequences, width)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    kernels = {
        "prefill attention": (prefill_tile(DTYPE, HEAD_DIM, group, device), prefill_attention.prefill_attention_triton)
    }
    if in_cuda:
        kernels["prefill attention, CUDA C++"] = (CUDA_TILE, cuda.flash_attention)
    dense = (q.view(sequences, length, HEADS, HEAD_DIM), *(_dense(x, tables, group) for x in (k, v)))
    reference_us, name = best_sdpa(*(x.transpose(1, 2).contiguous() for x in dense))
    size = 2 * q.nbytes + k.nbytes + v.nbytes
    flops = 4 * HEADS * HEAD_DIM * sequences * length * (length + 1) // 2
    shape = f"{sequences} x {length}"
    for op, (tile, attend) in kernels.items():
        assert tile is not None
        prompts = prefill_attention.make_prompts(tile, group, rows, tables, lengths, lengths)
        us = median_us(partial(attend, q, k, v, prompts))
        yield row(copied, op, shape, size, us, reference_us, f"SDPA, {name}", flops)


def best_sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, str]:
    """(median microseconds, name) of the fastest of PyTorch's kernels; all are [sequences, H, length, D]."""
    found = []
    for name, kernel in SDPA.items():
        try:
            with sdpa_kernel([kernel]):
                found.append((median_us(lambda: scaled_dot_product_attention(q, k, v, is_causal=True)), name))
        except RuntimeError:
            continue  # not built in, or not for this GPU
    return min(found, default=(math.nan, "none"))


def store_row(device: torch.device, copied: float, tokens: int) -> KernelRow:
    """QK-norm, RoPE and the KV store of one layer."""
    k, v = _pool(-(-tokens // BLOCK) * 4, device)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    weights = _normal(device, 2, HEAD_DIM).unbind(0)
    table = torch.randn(4096, HEAD_DIM, device=device)
    positions = torch.randint(4096, (tokens,), dtype=torch.int32, device=device)
    slots = torch.randperm(k.shape[0] * BLOCK, device=device)[:tokens]
    size = tokens * width * DTYPE.itemsize
    count = max(1, min(MAX_SETS, CACHE_BYTES // size))
    sets: list[tuple[Tensor, ...]] = [(_normal(device, tokens, width),) for _ in range(count)]

    def call(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda qkv: function(qkv, positions, table, k, v, slots, *weights)

    us = in_turn(call(qkv_rope.norm_rope_store_triton), sets)
    reference_us = in_turn(call(qkv_rope.norm_rope_store), sets)
    size = 2 * size + tokens * (HEAD_DIM * 4 + 12)
    return row(copied, "QK-norm, RoPE, store", f"{tokens} tokens", size, us, reference_us, "PyTorch's definition")


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)


def _pool(blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (blocks, BLOCK, KV_HEADS, HEAD_DIM)
    return _normal(device, *shape), _normal(device, *shape)


def _dense(cache: Tensor, tables: Tensor, group: int) -> Tensor:
    """[sequences, length, H, D]: blocks in order, heads repeated."""
    return cache[tables.long()].flatten(1, 2).repeat_interleave(group, dim=2)
