"""x Wᵀ + b, in whichever form the machine does fastest for this number of rows.

A decode step has a row for each sequence, and its time is the time to read W. C++ of our own (csrc/linear.cpp) does
that up to 16 rows. Beyond, a BLAS library is faster, and on a CPU the two ways to write the product differ: with
X [T, I] and W [O, I] it can be X Wᵀ, or W Xᵀ given back as its transpose. Milliseconds for all layer matrices of a
135M-parameter model (Intel Xeon, AVX-512, MKL, two threads, float32):

    rows        1     2     4     8    12    16
    C++        20    19    23    27    34    45
    X Wᵀ       21    21    39    49    60    67
    W Xᵀ       20    34    39    40    41    41

With hundreds of rows W Xᵀ is still ahead by up to a tenth, but its result lies column by column in memory. So there it
is taken only for who asks for it with `any_layout`.

On a GPU cuBLAS pads a few rows to a tile of 64 or more for its tensor cores, and leaves the memory idle at both ends of
each kernel. `gemv` keeps it busy across them, as long as its multiplications keep up. Microseconds on an H200, in
bfloat16, gemv / cuBLAS, for the layers of Qwen3-0.6B (millions of weights):

    rows   output 2.1   down 3.1     qkv 4.2     gate, up 6.3   lm_head 156
    1      2.6 / 12.8   3.2 / 7.6    2.8 / 4.8   3.5 / 6.0       70 / 78
    2      3.0 / 12.9   4.0 / 7.7    3.9 / 5.2   5.2 / 5.9       72 / 79
    4      4.0 /  8.4   5.7 / 7.7    4.8 / 5.2   8.5 / 5.9       96 / 79
    8      8.4 /  5.8  11.9 / 7.7    7.4 / 5.2  13.9 / 5.8      161 / 80

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from labkit.kernels import backend, native
from labkit.kernels.jit import jit, tl, triton
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import power_of_two

CPP_ROWS = range(1, 13)  # where C++ is ahead
FEW_ROWS = range(4, 65)  # where W Xᵀ is ahead on a CPU, the cost of its layout included
GEMV_ROWS, GEMV_SMALL_ROWS = 2, 4  # up to which a GPU takes `gemv`: for any weights, for a small matrix
GEMV_SMALL = 1 << 22  # weights of a small matrix
WHOLE_ROW = 8192  # weights of one output that a program loads at once; longer rows in steps of 1024


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, any_layout: bool = False) -> Tensor:
    """A linear layer.

    Args:
        x: [T, I]
        weight: [O, I]
        bias: [O]
        any_layout: the result may be a transposed view, also where that does not pay by itself.

    Returns:
        [T, O]; for few rows on a CPU it may be a transposed view.
    """
    rows = x.shape[0]
    if rows in CPP_ROWS and backend.on_cpp(x, weight):
        return native.linear(x, weight, bias)
    if backend.on_triton():  # whose other kernels want rows
        return (gemv if _suits_gemv(x, weight) else functional.linear)(x, weight, bias)
    if x.device.type != "cpu" or not (rows in FEW_ROWS or (any_layout and rows > 1)):
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t()


def _suits_gemv(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemv` can do it and is ahead of cuBLAS."""
    most = GEMV_SMALL_ROWS if weight.numel() <= GEMV_SMALL else GEMV_ROWS
    possible = x.numel() > 0 and x.stride(-1) == 1 and weight.is_contiguous()
    return possible and x.shape[0] <= most and x.device.type == "cuda"  # Triton's interpreter would take minutes


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
