"""How large a piece of attention one Triton program takes, by head size, number format and chip.

A tile of keys and one of values wait in shared memory for every stage of the pipeline, so

    stages × tokens × D (a power of two) × bytes × 2  (+ rows × D × bytes of queries, for prefill)

must fit: 64 KB on Turing, 163 KB on A100, 99 KB on other Ampere and Ada chips, 227 KB on Hopper.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels import backend, cuda
from labkit.kernels.jit import triton

LOG2_E = math.log2(math.e)  # exponentials are taken to the base 2, which is what the hardware has
DOT_ROWS = 16  # the fewest that tl.dot takes


@dataclass(frozen=True)
class DecodeTile:
    rows: int  # query heads
    tokens: int
    warps: int
    stages: int
    dot: bool = True  # tl.dot; else multiply and sum


@dataclass(frozen=True)
class PrefillTile:
    rows: int  # tokens × query heads of a group
    tokens: int  # keys at a time
    warps: int
    stages: int
    registers: int | None = None  # a thread may have, so that another program fits beside this one


CUDA_TILE = PrefillTile(cuda.FLASH_ROWS, 64, 8, 3)  # csrc/flash_attention.cu's only one


def decode_tile(q: Tensor, group: int, few: bool = False) -> DecodeTile:
    """The tile for decoding.

    Args:
        q: [S, H, D]
        group: query heads for each key/value head
        few: a batch so small that the longest program counts, not bandwidth
    """
    tensor_cores, shared = _chip(q.device)
    return decode_tile_for(q.dtype, q.shape[2], group, few, tensor_cores, shared)


def prefill_tile(dtype: torch.dtype, head_dim: int, group: int, device: torch.device) -> PrefillTile | None:
    """The tile for prompts; None where tl.dot is too slow to be worth one."""
    tensor_cores, shared = _chip(device)
    return prefill_tile_for(dtype, head_dim, group, shared) if tensor_cores else None


def decode_tile_for(
    dtype: torch.dtype, head_dim: int, group: int, few: bool, tensor_cores: bool, shared: int
) -> DecodeTile:
    """`decode_tile`, from facts alone; `shared` is the bytes of shared memory that a program may have."""
    width = power_of_two(head_dim)
    if not tensor_cores:
        rows = min(4, power_of_two(group))
        return DecodeTile(rows, max(4, 8192 // (rows * width)), 4, 1, dot=False)
    rows = max(DOT_ROWS, power_of_two(group))
    if few and rows == DOT_ROWS and width <= 128 and dtype.itemsize == 2:
        return DecodeTile(rows, 32, 1, 2)  # a warp needs nobody to wait for, and a few of these hide each other's waits
    tokens = 32 if few else 64
    for stages in (3, 2, 2, 1):
        if stages * tokens * width * dtype.itemsize * 2 <= min(shared, 100_000):
            return DecodeTile(rows, tokens, 4, stages)
        tokens = max(16, tokens // 2)
    return DecodeTile(rows, 16, 4, 1)


def prefill_tile_for(dtype: torch.dtype, head_dim: int, group: int, shared: int) -> PrefillTile:
    """`prefill_tile`, from facts alone."""
    width = max(64, power_of_two(head_dim))
    if dtype == torch.float32:  # no tensor cores in exact float32: small tiles, or registers run out
        return PrefillTile(max(32, power_of_two(group)), 32, 4, 1 if width > 128 else 2)
    if shared > 200_000 and width <= 128 and group <= 128:  # Hopper
        # Two programs share a multiprocessor and its 65,536 registers: 128 for each of 2 × 256 threads. Half the rows
        # would read keys and values twice as often: more than the second cache delivers (4.8 TB/s with 64 rows).
        return PrefillTile(128, 32 if width == 128 else 64, 8, 3, registers=128)
    # Small tiles, of which several share a multiprocessor: one computes its softmax while the others multiply.
    rows = max(64, power_of_two(group))
    for tokens in (64, 32):
        if (2 * tokens * 2 + rows) * width * dtype.itemsize <= shared - 2048:
            return PrefillTile(rows, tokens, 4 if rows == 64 else 8, 2)
    return PrefillTile(rows, 32, 4, 1)


def has_room(device: torch.device, shared: int) -> bool:
    """Whether tl.dot has tensor cores here, and a program may have this many bytes of shared memory."""
    tensor_cores, most = _chip(device)
    return tensor_cores and shared <= most


def power_of_two(number: int) -> int:
    """The smallest one that is not below it; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


@functools.cache
def _chip(device: torch.device) -> tuple[bool, int]:
    """(tl.dot has tensor cores, bytes of shared memory for a program)."""
    if device.type != "cuda":
        return True, 1 << 30  # Triton's interpreter
    known = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return backend.has_tensor_cores(device), known["max_shared_mem"]
