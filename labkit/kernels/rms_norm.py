"""RMSNorm, alone and with the residual stream's addition (Zhang & Sennrich 2019, arXiv:1910.07467).

`rms_norm` and `add_rms_norm` hold the definition; their namesakes below do the same in Triton, in one pass over memory,
and csrc/rms_norm.cu in CUDA C++.

Letters: T tokens, E width, H heads, D head size (Qwen3 normalises each head).
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import backend, cuda, native
from labkit.kernels.jit import jit, tl, triton
from labkit.kernels.launch import dependent
from labkit.kernels.tiles import power_of_two


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension.

    The mean and the division are done in float32; the result is cast back before it is multiplied by the weight, as
    llama does it, so that 16-bit models agree bit for bit with the weights' training.

    Args:
        x: [..., E]
        weight: [E]

    Returns:
        [..., E], of x's type; a new tensor.
    """
    if x.dim() == 2 and backend.on_cpp(x, weight):
        return native.rms_norm(x, weight, eps)
    if backend.on_cuda():
        return cuda.rms_norm(x, weight, eps)
    if backend.on_triton():
        return rms_norm_triton(x, weight, eps)
    wide = x.float()
    # The norm of a row is one pass over memory; squaring, then a mean, would be two.
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return (wide * mean_square.add_(eps).rsqrt_()).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds a block's output to the residual stream and normalises the sum for the next block.

    Args:
        x: [T, E], what the block put out
        residual: [T, E], the stream so far. Overwritten by the sum.
        weight: [E]

    Returns:
        (normalised, residual + x), both [T, E]
    """
    if backend.on_cpp(x, residual, weight):
        return native.add_rms_norm(x, residual, weight, eps)
    if backend.on_cuda():
        return cuda.add_rms_norm(x, residual, weight, eps)
    if backend.on_triton():
        return add_rms_norm_triton(x, residual, weight, eps)
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one pass; x is [T, E] or [T, H, D] with any strides but that of the last dimension, which is 1."""
    rows = x if x.dim() == 2 else x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -3) if x.dim() > 3 else x
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, weight, out, eps)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in one pass: both read once, the sum and its norm written once."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, eps)
    return out, residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """x is [T, E] or [T, H, D]; out has its shape, contiguous; residual [T, E] gets the sum."""
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    if rows == 0:
        return
    assert x.stride(-1) == 1 and weight.is_contiguous() and (residual is None or residual.stride(-1) == 1)
    block = power_of_two(width)
    # A thread takes 32 numbers of a long row: four loads of 16 bytes on their way at once. Short rows share a program.
    warps = min(max(block // 1024, 1), 16)
    together = max(1, 1024 // block)
    _rms_norm_kernel[(triton.cdiv(rows, together),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        rows,
        heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        eps,
        width,
        ADD=residual is not None,
        ROWS=together,
        BLOCK=block,
        num_warps=warps,
        **dependent(x.device),
    )


@jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    rows,
    heads,
    token_stride,
    head_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program normalises ROWS rows [ROWS, BLOCK], whole in its registers."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row // heads * token_stride + row % heads * head_stride + column, mask=inside, other=0.0)
    if ADD:
        stream = residual + row * residual_stride + column
        total = value.to(tl.float32) + tl.load(stream, mask=inside, other=0.0).to(tl.float32)
        value = total.to(value.dtype)  # what the norm is taken of is what the stream holds: rounded
        tl.store(stream, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normed * w).to(value.dtype), mask=inside)
