"""x Wᵀ + b, in whichever form the machine does fastest for this number of rows."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer.

    Args:
        x: [T, I]
        weight: [O, I]
        bias: [O]

    Returns:
        [T, O]
    """
    return functional.linear(x, weight, bias)
