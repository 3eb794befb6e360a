"""How each half of a layer begins: the residual addition, the norm and the product, after gate and up with SiLU × mul.

    residual += x
    out       = rms_norm(residual) Wᵀ + b            or, gated, silu_mul of that

The definition is these operations one after the other. With one row on a GPU they are a single kernel here (with
two also, where no CUDA C++ can be built), with two to eight one in csrc/few_rows.cu, which has the addition at the end
of the product before. Nothing is computed faster by that, but a decode step of one sequence is some hundred kernels,
and each begins and ends with a microsecond in which the memory has little to do. Every program adds and normalises the
whole row again: it has to read the row anyway, and 132 multiprocessors do in the same time what one would. Only the
first writes the sum down.

Letters: T rows, E width, O outputs, F = O/2 of a gated one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import activation, backend, cuda, linear, rms_norm
from labkit.kernels.jit import jit, tl, triton
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import power_of_two

WARPS = 2
WEIGHTS = 128 * 32 * WARPS  # of a program: 128 are on their way in each thread


def norm_linear(
    x: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Adds a block's output to the residual stream, and begins the next block.

    Args:
        x: [T, E], what the block put out; None: it is in the stream already (`linear_add`), or there was none
        residual: [T, E], the stream so far. May be overwritten.
        norm: [E], the norm's weight
        weight: [O, E]; gated: the gate's F rows, then up's
        bias: [O]; a gated product has none
        gated: SiLU × mul comes after it

    Returns:
        ([T, O], gated [T, F]; for few rows on a CPU it may be a transposed view. The stream with x in it, [T, E].)
    """
    if x is None and backend.few_rows_on_cuda() and cuda.takes_few_rows(residual, weight, norm):
        return cuda.few_rows(residual, weight, bias, norm, eps, gated), residual
    if _is_fused(residual, weight):
        return norm_linear_triton(x, residual, norm, eps, weight, bias, gated)
    if x is None:
        normed = rms_norm.rms_norm(residual, norm, eps)
    else:
        normed, residual = rms_norm.add_rms_norm(x, residual, norm, eps)
    out = linear.linear(normed, weight, bias, any_layout=gated)
    return activation.silu_mul(out) if gated else out, residual


def _is_fused(residual: Tensor, weight: Tensor) -> bool:
    """With more rows cuBLAS or tensor cores do the product, and a batch-invariant one is the same for any number."""
    rows, width = residual.shape
    return (
        backend.current in ("triton", backend.FASTEST)
        and not backend.invariant
        and residual.is_cuda  # Triton's interpreter would take minutes
        and 0 < rows <= linear.GEMV_ROWS
        and width <= WEIGHTS
        and weight.is_contiguous()
    )


def norm_linear_triton(
    x: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` in one kernel, for E up to WEIGHTS; the stream comes back as a new tensor."""
    rows, width = residual.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=residual.dtype, device=residual.device)
    stream = residual if x is None else torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    block = power_of_two(width)
    together = max(1, min(4, WEIGHTS // block) // (2 if gated else 1))
    _norm_linear_kernel[(triton.cdiv(outputs, together),)](
        residual if x is None else x,
        residual,
        norm,
        weight,
        norm if bias is None else bias,
        out,
        stream,
        outputs,
        0 if x is None else x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=width,
        ROWS=rows,
        PADDED_ROWS=power_of_two(rows),
        OUTPUTS=together,
        BLOCK=block,
        ADD=x is not None,
        BIAS=bias is not None,
        GATED=gated,
        num_warps=WARPS,
        **dependent(residual.device),
    )
    return out, stream


@jit
def _norm_linear_kernel(
    x,
    residual,
    norm,
    weight,
    bias,
    out,
    stream,
    outputs,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program makes OUTPUTS columns of the result, for every row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    wanted = (output < outputs)[:, None] & inside[None, :]
    at = weight + output.to(tl.int64)[:, None] * WIDTH + column[None, :]
    w = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    up_w = w
    if GATED:
        up_at = weight + (output + outputs).to(tl.int64)[:, None] * WIDTH + column[None, :]
        up_w = tl.load(up_at, mask=wanted, other=0.0).to(tl.float32)
    scale = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    which = tl.arange(0, PADDED_ROWS)[:, None]
    total = tl.zeros((PADDED_ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((PADDED_ROWS, OUTPUTS), tl.float32)
    for row in tl.static_range(ROWS):
        value = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        if ADD:
            added = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
            value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)  # rounded, as the stream holds it
            if tl.program_id(0) == 0:
                tl.store(stream + row * WIDTH + column, value, mask=inside)
        wide = value.to(tl.float32)
        normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)).to(value.dtype).to(tl.float32)
        numbers = (normed * scale).to(value.dtype).to(tl.float32)
        total += tl.where(which == row, tl.sum(w * numbers[None, :], axis=1)[None, :], 0.0)
        if GATED:
            up += tl.where(which == row, tl.sum(up_w * numbers[None, :], axis=1)[None, :], 0.0)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    place = out + which * outputs + output[None, :]
    kind = out.dtype.element_ty
    result = total.to(kind)
    if GATED:  # rounded wherever the operations one by one round
        gate = result.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        result = (silu * up.to(kind).to(tl.float32)).to(kind)
    tl.store(place, result, mask=(which < ROWS) & (output < outputs)[None, :])
