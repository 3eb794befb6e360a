"""x Wᵀ + b, in whichever form the machine does fastest for this number of rows.

On a CPU the two ways to write the same product differ. With X [T, I] and W [O, I] a BLAS library can take X Wᵀ, or
W Xᵀ and give back the transpose of it. For a few rows the second is faster: the big matrix is then the left operand,
which is streamed from memory once, while the small one stays in the cache. Milliseconds for all layer matrices of a
135M-parameter model (Intel Xeon, AVX-512, MKL, one thread, float32):

    rows     1     2     4     8    16    64   512
    X Wᵀ    39    46    70    95   119   239  1160
    W Xᵀ    41    76    74    78    81   207  1044

From some hundred rows on they do the same work, and X Wᵀ leaves its result the way attention wants it.

On a GPU one to eight rows have a kernel of their own (`gemv`).

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from labkit.kernels.jit import jit, tl, triton
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import power_of_two

FEW_ROWS = range(4, 65)  # where a CPU takes W Xᵀ
GEMV_ROWS = 8  # up to which a GPU takes `gemv`
WHOLE_ROW = 8192  # weights of one output that a program loads at once; longer rows in steps of 1024


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer.

    Args:
        x: [T, I]
        weight: [O, I]
        bias: [O]

    Returns:
        [T, O]; for few rows on a CPU as a transposed view.
    """
    if x.device.type != "cpu" or x.shape[0] not in FEW_ROWS:
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t()


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` on a GPU: the kernel below for a few rows, cuBLAS for many.

    A few rows are bound by reading the weights, W [O, I], once. cuBLAS pads them to a tile of 64 or more for its
    tensor cores and leaves the memory idle at both ends of each kernel; this one keeps it busy across them.
    """
    possible = x.numel() > 0 and x.stride(-1) == 1 and weight.is_contiguous()
    if possible and x.shape[0] <= GEMV_ROWS and x.device.type == "cuda":  # Triton's interpreter would take minutes
        return gemv(x, weight, bias)
    return functional.linear(x, weight, bias)


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [T, I] of 1 to 8 rows, summed in float32."""
    rows, width = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block, warps = min(power_of_two(width), WHOLE_ROW), 2 if width <= 4096 else 4
    if width > WHOLE_ROW:
        block, warps = 1024, 2
    # 4096 weights a program of 64 threads: 64 of them are on their way in each thread.
    together = max(1, min(4, 64 * 32 * warps // block))
    _gemv_kernel[(triton.cdiv(outputs, together),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        outputs,
        x.stride(0),
        WIDTH=width,
        ROWS=rows,
        PADDED_ROWS=power_of_two(rows),
        OUTPUTS=together,
        BLOCK=block,
        BIAS=bias is not None,
        num_warps=warps,
        **dependent(x.device),
    )
    return out


@jit
def _gemv_kernel(
    x,
    weight,
    bias,
    out,
    outputs,
    x_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program makes OUTPUTS columns of the result, for every row. Up to WHOLE_ROW there is one step only."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, BLOCK)
    matrix = weight + output.to(tl.int64)[:, None] * WIDTH + column[None, :]
    real = (output < outputs)[:, None]
    w = tl.load(matrix, mask=real & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    which = tl.arange(0, PADDED_ROWS)[:, None]
    total = tl.zeros((PADDED_ROWS, OUTPUTS), tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        for row in tl.static_range(ROWS):
            numbers = tl.load(x + row * x_stride + begin + column, mask=begin + column < WIDTH, other=0.0)
            part = tl.sum(w * numbers.to(tl.float32)[None, :], axis=1)  # [OUTPUTS]
            total += tl.where(which == row, part[None, :], 0.0)
        if WIDTH > BLOCK:
            following = begin + BLOCK + column
            w = tl.load(matrix + (begin + BLOCK), mask=real & (following < WIDTH)[None, :], other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    place = out + which * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(which < ROWS) & (output < outputs)[None, :])
