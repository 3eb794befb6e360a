"""The smallest Triton kernel: does Triton work here at all? Compiled on a GPU, in its interpreter on a CPU.

Import it only once TRITON_INTERPRET is as it should be: the decorator below reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(source, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place) + 1.0)


def adds_one(device: torch.device) -> bool:
    """Run the kernel and look at what it gave."""
    source = torch.arange(16, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    _add_one[(1,)](source, target, SIZE=16)
    return torch.equal(target, source + 1)
