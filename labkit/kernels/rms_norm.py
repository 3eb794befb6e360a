"""RMSNorm, alone and with the residual stream's addition (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.kernels import backend, native


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
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
