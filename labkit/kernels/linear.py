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

On a GPU cuBLAS pads a few rows to a larger tile, and leaves the memory idle at both ends of each kernel. `gemv` (1
row), `cuda.few_rows` (2 to 8, where it can be built; else `gemv` for 2) and `few_rows` (up to 16) have their weights
on the way while the kernel in front still runs; with many weights cuBLAS catches up. Microseconds on an H200, bfloat16,
for layers of Qwen3-0.6B:

                                rows 1                       rows 4                                 rows 8
    weights, millions        gemv   cuBLAS     cuda.few_rows   few_rows   cuBLAS      cuda.few_rows   few_rows   cuBLAS
    output      2.1           2.6     12.9               2.9        3.7      8.5                3.0        4.2      5.8
    down        3.1           3.3      7.7               3.4        6.1      7.7                3.6        6.2      7.7
    qkv         4.2           2.8      5.2               3.7        4.2      5.2                3.8        4.6      5.1
    gate, up    6.3           3.5      6.0               4.4        5.5      5.9                4.8        5.8      5.8
    lm_head   156              69       75                84        121       77                 86        125       78

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from labkit.kernels import backend, cuda, native
from labkit.kernels.invariant_linear import invariant_linear
from labkit.kernels.jit import jit, tl, triton
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import has_room, power_of_two

CPP_ROWS = range(1, 13)  # where C++ is ahead
FEW_ROWS = range(4, 65)  # where W Xᵀ is ahead on a CPU, the cost of its layout included
GEMV_ROWS = 2  # up to which a GPU takes `gemv`
TILE = 16  # rows and outputs of a program of `few_rows`
FEW_WEIGHTS = 1 << 22  # up to which a GPU takes `few_rows`
FEW_SHARED = 192 << 10  # bytes of shared memory that it needs: Hopper has them
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
    if backend.few_rows_on_cuda() and cuda.takes_few_rows(x, weight):
        return cuda.few_rows(x, weight, bias)
    if backend.on_triton():  # whose other kernels want rows
        return (invariant_linear if backend.invariant else _on_gpu(x, weight))(x, weight, bias)
    if x.device.type != "cpu" or not (rows in FEW_ROWS or (any_layout and rows > 1)):
        return functional.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t()


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, any_layout: bool = False) -> tuple[Tensor | None, Tensor]:
    """How each half of a layer ends: a product that belongs into the residual stream.

    Args:
        x: [T, I]
        weight: [E, I]
        residual: [T, E], the stream so far
        any_layout: as for `linear`

    Returns:
        (None, the stream with the product in it) where one kernel does both; else (the product, the stream as it was):
        then `norm_linear` adds them, in its own pass over both.
    """
    if backend.few_rows_on_cuda() and cuda.takes_few_rows(x, weight):
        return None, cuda.few_rows(x, weight, residual=residual)
    return linear(x, weight, any_layout=any_layout), residual


def _on_gpu(x: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The fastest version on a GPU. Triton's interpreter would take minutes."""
    rows = x.shape[0]
    if x.device.type != "cuda" or rows not in range(1, TILE + 1) or x.stride(1) != 1 or not weight.is_contiguous():
        return functional.linear
    if rows <= GEMV_ROWS:
        return gemv
    small = weight.numel() <= FEW_WEIGHTS and x.dtype != torch.float32
    return few_rows if small and has_room(x.device, FEW_SHARED) else functional.linear


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


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [T, I] of at most 16 rows of 16 bits, multiplied on tensor cores, summed in float32."""
    rows, width = x.shape
    outputs = weight.shape[0]
    parts = 4 if width <= 1024 else 8
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _few_rows_kernel[(triton.cdiv(outputs, TILE),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        x.stride(0),
        WIDTH=width,
        TILE=TILE,
        PARTS=parts,
        PART=max(16, min(256, power_of_two(triton.cdiv(width, parts)))),
        BIAS=bias is not None,
        num_warps=parts,
        **dependent(x.device),
    )
    return out


@jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    x_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program makes TILE columns of the result; each of its warps multiplies a part of the width."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.arange(0, TILE)
    column = tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]  # [PARTS, PART]
    matrix = weight + output.to(tl.int64)[None, :, None] * WIDTH + column[:, None, :]
    real = (output < outputs)[None, :, None]
    w = tl.load(matrix, mask=real & (column < WIDTH)[:, None, :], other=0.0)  # [PARTS, TILE, PART]
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((PARTS, TILE, TILE), tl.float32)
    for begin in range(0, WIDTH, PARTS * PART):
        now = begin + column
        following = now + PARTS * PART
        numbers = tl.load(
            x + row[None, None, :] * x_stride + now[:, :, None],
            mask=(row < rows)[None, None, :] & (now < WIDTH)[:, :, None],
            other=0.0,
        )  # [PARTS, PART, TILE]
        next_w = w
        if WIDTH > PARTS * PART:
            next_w = tl.load(matrix + (begin + PARTS * PART), mask=real & (following < WIDTH)[:, None, :], other=0.0)
        total = tl.dot(w, numbers, total)
        w = next_w
    result = tl.sum(total, axis=0)  # [outputs, rows]
    if BIAS:
        result += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    place = out + row[None, :] * outputs + output[:, None]
    tl.store(place, result.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (output < outputs)[:, None])
