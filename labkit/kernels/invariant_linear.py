"""x Wᵀ + b in which a row's result does not depend, in any bit, on how many rows there are.

BLAS libraries choose another kernel for another number of rows: other tiles, a sum split in other places, and so other
roundings. In 16 bits that now and then turns a token into another. Here every result is one chain of products,
in the order of the inputs, added up in float32 by the same instruction, whatever the tile it lies in.

`linear.linear` is the definition; `EngineConfig.batch_invariant` makes it come here on a GPU.

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels.jit import jit, tl, triton

GROUP = 8  # tiles of rows that run side by side, so that they find the weights in the L2 cache
FEW = 64  # rows up to which a narrow tile is taken: more programs to read the weights


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, I], [O, I], [O] -> [T, O]"""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, width = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    wide = x.dtype == torch.float32
    tile_outputs, warps = (32, 4) if rows <= FEW or wide else (128, 4)
    grid = triton.cdiv(rows, 64) * triton.cdiv(outputs, tile_outputs)
    _linear_kernel[(grid,)](
        x,
        weight,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        x.stride(0),
        weight.stride(0),
        WIDTH=width,
        ROWS=64,
        OUTPUTS=tile_outputs,
        STEP=32 if wide else 64,
        GROUP=GROUP,
        BIAS=bias is not None,
        num_warps=warps,
        num_stages=2 if wide else 4,
    )
    return out


@jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    x_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One program makes a tile [ROWS, OUTPUTS]."""
    row_tiles = tl.cdiv(rows, ROWS)
    together = GROUP * tl.cdiv(outputs, OUTPUTS)
    first = tl.program_id(0) // together * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row_tile = first + tl.program_id(0) % together % height
    row = row_tile * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) % together // height * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, STEP)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for begin in range(0, WIDTH, STEP):
        inside = begin + column < WIDTH
        numbers = tl.load(
            x + row.to(tl.int64)[:, None] * x_stride + begin + column[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + output.to(tl.int64)[None, :] * weight_stride + begin + column[:, None],
            mask=(output < outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(numbers, w, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (output < outputs)[None, :])
