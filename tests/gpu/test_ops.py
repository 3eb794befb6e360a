"""Norms, SiLU, linears and sampling in Triton on the GPU, against PyTorch's definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from labkit.kernels import activation, draw, linear, norm_linear, rms_norm
from tests.unit.kernels.draws import Wishes, changed, defined, parameters

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCAB = 151_936


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def strided(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, width + 5, device="cuda").to(dtype)[:, 2 : width + 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 17, 576, 1000, 4096, 16384])
@pytest.mark.parametrize("rows", [0, 1, 3, 1000])
def test_pointwise(rows: int, width: int, dtype: torch.dtype) -> None:
    # Two roundings may each fall to the other side. float16: 2 × 2^-10.
    near = {"rtol": 2e-3, "atol": 1e-5} if dtype == torch.float16 else {}
    for make in (strided, lambda *args: strided(*args).contiguous()):
        x, weight = make(rows, width, dtype), torch.randn(width, device="cuda").to(dtype)
        torch.testing.assert_close(
            rms_norm.rms_norm_triton(x, weight, 1e-5), rms_norm.rms_norm(x, weight, 1e-5), **near
        )
        residual = make(rows, width, dtype)
        ours = residual.clone()
        want, _ = rms_norm.add_rms_norm(x, residual, weight, 1e-5)
        got, _ = rms_norm.add_rms_norm_triton(x, ours, weight, 1e-5)
        torch.testing.assert_close(got, want, **near)
        assert torch.equal(ours, residual)
        gate_up = make(rows, 2 * width, dtype)
        torch.testing.assert_close(activation.silu_mul_triton(gate_up), activation.silu_mul(gate_up.clone()), **near)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (29, 17), (6144, 1024), (1024, 3072), (2048, 8192), (7, 14336)])
def test_gemv(outputs: int, width: int, rows: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = strided(rows, width, dtype), torch.randn(outputs, width, device="cuda").div(math.sqrt(width)).to(dtype)
    added = torch.randn(outputs, device="cuda").to(dtype) if bias else None
    want = x.double() @ weight.double().T + (0 if added is None else added.double())
    near = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype] * want.norm()
    assert (linear.gemv(x, weight, added).double() - want).norm() <= near
    if dtype != torch.float32:
        assert (linear.few_rows(x, weight, added).double() - want).norm() <= near


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("outputs", "width"), [(29, 17), (3072, 1024), (8192, 2048), (1000, 4096)])
def test_norm_linear(outputs: int, width: int, rows: int, gated: bool, dtype: torch.dtype) -> None:
    x, residual = strided(rows, width, dtype), strided(rows, width, dtype)
    norm = torch.randn(width, device="cuda").to(dtype)
    weight = torch.randn(outputs * (2 if gated else 1), width, device="cuda").div(math.sqrt(width)).to(dtype)
    bias = None if gated else torch.randn(outputs, device="cuda").to(dtype)
    for block_output in (x, None):
        kept = residual.clone()
        got, stream = norm_linear.norm_linear_triton(block_output, residual, norm, 1e-5, weight, bias, gated)
        want, want_stream = norm_linear.norm_linear(block_output, kept, norm, 1e-5, weight, bias, gated)
        assert torch.equal(stream, want_stream)
        near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype] * want.double().norm()
        assert (got.double() - want.double()).norm() <= near


@pytest.mark.parametrize("rows", [1, 8])
def test_a_chain_that_overlaps_is_the_chain_one_by_one(rows: int) -> None:
    """Kernels that start before the one in front has ended must still read what it wrote; also in a CUDA graph."""
    weights = [torch.randn(1024, 1024, device="cuda").div(32).bfloat16() for _ in range(40)]
    norm = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(rows, 1024, device="cuda").bfloat16()

    def chain(wait: bool) -> Tensor:
        x, residual = start, start.clone()
        for weight in weights:
            x = (linear.gemv if rows <= 2 else linear.few_rows)(x, weight)
            if wait:
                torch.cuda.synchronize()
            if rows <= 2:
                x, residual = norm_linear.norm_linear_triton(x, residual, norm, 1e-6, weight)
            else:
                x, residual = rms_norm.add_rms_norm_triton(x, residual, norm, 1e-6)
            if wait:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    for _ in range(20):
        assert torch.equal(chain(False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(False)
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


FILTERS = [
    Wishes(0.6),
    Wishes(0.0),
    Wishes(0.6, top_k=50),
    Wishes(1.0, top_k=1),
    Wishes(0.6, top_p=0.9, top_k=50),
    Wishes(1.0, top_p=0.9),
    Wishes(0.7, top_p=0.3, min_p=0.01),
    Wishes(1.0, min_p=0.1, top_k=5000),
    Wishes(1.0, top_p=0.9, top_k=400),
    Wishes(1.0, top_p=0.9, top_k=5000),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("vocab", [11, 49_152, VOCAB, 262_145])
def test_draws_are_those_of_the_definition(vocab: int, spread: float, dtype: torch.dtype) -> None:
    rows = [Wishes(w.temperature, w.top_p, w.min_p, top_k=w.top_k, seed=s) for w in FILTERS for s in range(8)]
    table = parameters(rows, "cuda")
    slots = torch.randperm(len(rows), device="cuda").int()
    positions = torch.randint(0, 99_999, (len(rows),), device="cuda").int()
    logits = (spread * torch.randn(len(rows), vocab, device="cuda")).to(dtype)
    tokens, own = draw.draw(logits, table, slots, positions, logprobs=True)
    different = tokens != defined(logits, table, slots, positions)
    # Where two tokens are a rounding apart, either may win; a sum over a vocabulary has a rounding, too.
    assert different.sum() <= 1, different.nonzero()
    want = logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-4)


def test_changes_and_a_graph() -> None:
    """Bias, bans and penalties; then the same from a graph, replayed with other logits."""
    rows = [Wishes(0.8, 0.9, 0.0, 1.3, 0.5, 0.2, top_k=20, seed=s) if s % 2 else Wishes(0.8, seed=s) for s in range(16)]
    table, slots = parameters(rows, "cuda"), torch.arange(16, dtype=torch.int32, device="cuda")
    counts = torch.randint(-3, 3, (16, VOCAB), device="cuda").clamp(min=0).int()
    seen = counts > 0
    adjustments = torch.tensor([[0, 0, 5], [3, VOCAB - 1, 100]], dtype=torch.int32, device="cuda")
    values = torch.tensor([50.0, -math.inf, 60.0], device="cuda").view(torch.int32)
    changes = draw.Changes(torch.cat((adjustments, values.unsqueeze(0))), seen, counts)
    logits = torch.randn(16, VOCAB, device="cuda")
    draw.draw(logits, table, slots, slots, changes=changes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = draw.draw(logits, table, slots, slots, changes=changes)
    for _ in range(3):
        logits.normal_(std=3)
        want = defined(changed(logits, table, slots, changes.adjustments, seen, counts), table, slots, slots)
        before = counts.sum()
        graph.replay()
        assert tokens.tolist() == want.tolist()
        assert counts.sum() == before + 8  # of the rows with penalties
    assert tokens[0] == 3 and tokens[5] == 100
