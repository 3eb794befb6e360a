"""What a GPU's memory allows: the bandwidth of a large copy, which every operation is held against."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.kernels.jit import jit, tl, triton

COPY_BYTES = 4 << 30  # dozens of times the L2 cache
BLOCKS = ((1024, 4), (2048, 8), (4096, 8), (8192, 8))  # elements and warps of a program


@jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """target = source, both [count], a block a program."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(target + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def copy(source: torch.Tensor, target: torch.Tensor, block: int, warps: int) -> None:
    """Copy contiguous tensors of one size with the multiprocessors."""
    count = source.numel()
    copy_kernel[(triton.cdiv(count, block),)](source, target, count, BLOCK=block, num_warps=warps)


def copy_bandwidths(device: torch.device) -> dict[str, float]:
    """Bytes a second of a copy of 4 GiB on the device, reads and writes counted, in several ways.

    `copy_` leaves it to the driver, whose choice is not always the fastest, so a plain kernel copies as well: what the
    operations could reach. Timed one by one, not from a CUDA graph as the operations are: a `copy_` in a graph is not
    done by the multiprocessors, and slower. The warm-up is long because a GPU that was idle has low clocks.
    """
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    ways: dict[str, Callable[[], object]] = {"copy_": lambda: target.copy_(source)}
    for block, warps in BLOCKS:
        ways[f"Triton, blocks of {block}"] = lambda b=block, w=warps: copy(source, target, b, w)  # type: ignore[misc]
    found = {}
    for name, way in ways.items():
        milliseconds = triton.testing.do_bench(way, warmup=200, rep=200, return_mode="median")
        found[name] = 2 * COPY_BYTES / (float(milliseconds) * 1e-3)
    return found
