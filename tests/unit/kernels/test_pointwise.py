"""RMSNorm, RoPE, SiLU × mul and linear against their formulas."""

from __future__ import annotations

import cmath

import pytest
import torch
from torch.nn.functional import linear as reference_linear

from labkit.config import RopeConfig
from labkit.kernels import activation, linear, rms_norm, rope

CPU = torch.device("cpu")
TYPES = [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)]


@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (5, 48), (3, 4, 24)])
@pytest.mark.parametrize("dtype,tolerance", TYPES)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(*shape[:-1], 2 * shape[-1]) * 3)[..., ::2].to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    got = rms_norm.rms_norm(x, weight, 1e-3)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    assert torch.equal(x, before)


def test_eps_counts() -> None:
    x = torch.full((1, 4), 0.01)
    assert rms_norm.rms_norm(x, torch.ones(4), 1.0).max() == pytest.approx(0.01, rel=1e-3)
    assert rms_norm.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6).tolist() == [[0.0] * 4]


def test_add_rms_norm() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    normed, stream = rms_norm.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(stream, total)
    assert torch.equal(normed, rms_norm.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("head_dim", [24, 64, 80])
@pytest.mark.parametrize("dtype,tolerance", TYPES)
def test_rope_turns_pairs(head_dim: int, dtype: torch.dtype, tolerance: float) -> None:
    """Each pair (i, i + D/2) as a complex number, turned by position / theta^(2i/D)."""
    table = rope.rope_table(RopeConfig(theta=500.0), head_dim, 40, CPU)
    positions = torch.tensor([0, 1, 39, 7], dtype=torch.int32)
    q = torch.randn(4, 2 * head_dim * 3).view(4, 6, head_dim)[:, ::2].to(dtype)
    k = torch.randn(4, 1, head_dim).to(dtype)
    before = q.clone()
    for x, got in zip((q, k), rope.apply_rope(q, k, positions, table), strict=True):
        assert got.dtype == dtype and got.shape == x.shape
        for t, position in enumerate(positions.tolist()):
            for i in range(head_dim // 2):
                turn = cmath.exp(1j * position / 500.0 ** (2 * i / head_dim))
                for head in range(x.shape[1]):
                    want = complex(x[t, head, i], x[t, head, i + head_dim // 2]) * turn
                    found = complex(got[t, head, i], got[t, head, i + head_dim // 2])
                    assert abs(found - want) < 4 * tolerance
    assert torch.equal(q, before)


def test_linear_rope_is_plain_rope_at_shorter_positions() -> None:
    plain = rope.rope_table(RopeConfig(), 32, 20, CPU)
    stretched = rope.rope_table(RopeConfig(rope_type="linear", factor=4.0), 32, 77, CPU)
    torch.testing.assert_close(stretched[::4], plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_long_ropes_need_the_original_length(kind: str) -> None:
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        rope.rope_table(RopeConfig(rope_type=kind, factor=2.0), 32, 8, CPU)
    with pytest.raises(ValueError, match="rope_type"):
        rope.rope_table(RopeConfig(rope_type="spiral"), 32, 8, CPU)


@pytest.mark.parametrize("dtype,tolerance", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_silu_mul(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    for gate_up in (torch.randn(rows, 20).to(dtype), torch.randn(20, rows).to(dtype).t()):
        gate, up = gate_up[:, :10].double(), gate_up[:, 10:].double()
        want = gate / (1 + (-gate).exp()) * up
        got = activation.silu_mul(gate_up)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 8, 64, 65, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows: int, with_bias: bool) -> None:
    """Every form gives the same product, also of what is not contiguous."""
    weight, bias = torch.randn(31, 20), torch.randn(31) if with_bias else None
    for x in (torch.randn(rows, 20), torch.randn(20, rows).t()):
        got = linear.linear(x, weight, bias)
        assert got.shape == (rows, 31)
        torch.testing.assert_close(got, reference_linear(x, weight, bias), atol=1e-4, rtol=1e-4)
