"""SiLU × mul: the gate of a llama MLP, as PyTorch defines it and in Triton.

Letters: T tokens, F intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from labkit.kernels import backend, native
from labkit.kernels.jit import jit, tl, triton
from labkit.kernels.launch import dependent

BLOCK, WARPS = 1024, 2  # numbers and warps of a Triton program: 16 a thread, two loads of 16 bytes for each of the two


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(x) = x * sigmoid(x).

    Args:
        gate_up: [T, 2F], the gate's columns first. Overwritten.

    Returns:
        [T, F]
    """
    if backend.on_cpp(gate_up):
        return native.silu_mul(gate_up)
    if backend.on_triton():
        return silu_mul_triton(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """`silu_mul` in one pass, into a new tensor [T, F]; gate_up [T, 2F] is left as it is."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    assert gate_up.stride(1) == 1
    grid = (tokens, triton.cdiv(width, BLOCK))
    _silu_mul_kernel[grid](
        gate_up, out, gate_up.stride(0), width, BLOCK=BLOCK, num_warps=WARPS, **dependent(gate_up.device)
    )
    return out


@jit
def _silu_mul_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program makes BLOCK numbers of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)  # rounded between the two, as PyTorch does
    tl.store(out + row * width + column, (silu * up).to(gate.dtype), mask=inside)
