"""Rotary position embedding: angles from the position, turned into every query and key (arXiv:2104.09864).

Dimension i of a head is paired with dimension i + D/2 (the "half-split" order of Hugging Face checkpoints); the pair
is turned by position × frequency[i]. Long-context models change the frequencies: `linear` divides all of them,
`llama3` only the slow ones, `yarn` blends the two over a range of dimensions (arXiv:2309.00071).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from labkit.config import RopeConfig
from labkit.kernels import backend, native


def rope_table(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of every position below `length`.

    Returns:
        [length, D] float32: D/2 cosines, then D/2 sines.
    """
    frequencies, scale = _frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)  # [length, D/2]
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns queries and keys by their positions.

    Args:
        q: [T, H, D]
        k: [T, K, D]
        positions: [T] int
        cos_sin: [length, D], the table of `rope_table`

    Returns:
        q and k turned, as new tensors of the same shapes and types.
    """
    if backend.on_cpp(q, k, cos_sin):
        return native.rope(q, positions, cos_sin), native.rope(k, positions, cos_sin)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # each [T, 1, D/2]
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin), a and b the two halves of each head; x is [T, N, D]."""
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position for each of the D/2 pairs, and the scale of cosines and sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "default":
        return plain, 1.0
    if rope.rope_type == "linear":
        return plain / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, head_dim)
    raise ValueError(f"rope_type is {rope.rope_type!r}; it can be default, linear, llama3 or yarn")


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise ValueError(f"rope_type {rope.rope_type!r} needs original_max_position_embeddings")
    return rope.original_max_position_embeddings


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a ramp between (Llama 3.1's reference code)."""
    turns = _original_length(rope) * plain / (2 * math.pi)  # full turns within the length it was trained on
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, plain: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """NTK-by-parts of YaRN (section 3.2 and 3.4): dimensions that turn often are kept, the others interpolated."""
    original = _original_length(rope)

    def dimension(turns: float) -> float:
        """The pair that makes this many turns within the original length."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs some width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp, _yarn_scale(rope)


def _yarn_scale(rope: RopeConfig) -> float:
    """What YaRN multiplies cosines and sines by, so that attention keeps its temperature (section 3.4)."""

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
