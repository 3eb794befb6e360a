"""SiLU × mul: the gate of a llama MLP."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu(x) = x * sigmoid(x).

    Args:
        gate_up: [T, 2F], the gate's columns first. Overwritten.

    Returns:
        [T, F], a view of the gate's columns
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)
