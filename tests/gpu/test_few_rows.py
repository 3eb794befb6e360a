"""Products for few rows in CUDA C++, against the operations they are made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.kernels import activation, backend, cuda, linear, norm_linear, rms_norm

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
# Widths: less than a step of a warp, less than a warp's share, several rounds of 16 warps; none a multiple of all.
SHAPES = [(1, 8), (7, 40), (16, 256), (100, 576), (64, 1000), (1000, 1024), (1030, 2048), (33, 3072), (48, 8200)]
NEAR = {torch.float16: 1e-3, torch.bfloat16: 6e-3}  # relative error of a result that is rounded to this type


@pytest.fixture(autouse=True)
def there() -> None:
    torch.manual_seed(0)
    reason = backend.without_few_rows(DEVICE)
    if reason is not None:
        pytest.skip(f"products of CUDA C++ do not run here: {reason}")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def strided(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows that do not touch; numbers of nobody, which would be seen, between them."""
    both = torch.full((rows, width + 8), torch.nan, dtype=dtype, device=DEVICE)
    both[:, :width] = torch.randn(rows, width, device=DEVICE).to(dtype)
    return both[:, :width]


def check_near(got: Tensor, want: Tensor) -> None:
    """`want` is float64."""
    assert got.shape == want.shape
    near = NEAR[got.dtype]
    assert (got.double() - want).norm() <= near * want.norm() + near * want.numel() ** 0.5, float(want.norm())


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("rows", range(1, 9))
def test_products(rows: int, dtype: torch.dtype) -> None:
    for outputs, width in SHAPES:
        x, weight, bias = strided(rows, width, dtype), normal(outputs, width, dtype=dtype), normal(outputs, dtype=dtype)
        want = x.double() @ weight.double().t()
        check_near(cuda.few_rows(x, weight), want)
        check_near(cuda.few_rows(x, weight, bias), want + bias.double())
        residual = strided(rows, outputs, dtype)
        before = residual.clone()
        check_near(cuda.few_rows(x, weight, residual=residual), want + residual.double())
        assert torch.equal(residual, before)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_norm_in_front_and_gate_behind(rows: int) -> None:
    for outputs, width in SHAPES:
        x, norm, bias = strided(rows, width, torch.bfloat16), normal(width), normal(outputs)
        normed = rms_norm.rms_norm(x.double(), norm.double(), 1e-5)
        weight = normal(outputs, width)
        check_near(cuda.few_rows(x, weight, bias, norm, 1e-5), normed @ weight.double().t() + bias.double())
        gate_up = normal(2 * outputs, width) / width**0.5
        want = activation.silu_mul(normed @ gate_up.double().t())
        check_near(cuda.few_rows(x, gate_up, norm=norm, eps=1e-5, gated=True), want)


def test_float16_is_gated_without_a_norm() -> None:
    x, gate_up = normal(5, 1024, dtype=torch.float16), normal(600, 1024, dtype=torch.float16) / 32
    want = activation.silu_mul(x.double() @ gate_up.double().t())
    check_near(cuda.few_rows(x, gate_up, gated=True), want)


def test_results_repeat() -> None:
    x, weight, norm = normal(8, 2048), normal(1000, 2048), normal(2048)
    first = cuda.few_rows(x, weight, norm=norm, eps=1e-6)
    assert all(torch.equal(first, cuda.few_rows(x, weight, norm=norm, eps=1e-6)) for _ in range(20))


def test_what_it_does_not_take_goes_elsewhere() -> None:
    weight = normal(64, 1024)
    assert cuda.takes_few_rows(normal(2, 1024), weight) and cuda.takes_few_rows(normal(8, 1024), weight)
    wrong = [
        normal(9, 1024),
        normal(1, 1024),
        normal(0, 1024),
        normal(1024, 8).t(),
        strided(4, 1025, torch.bfloat16)[:, 1:],
    ]
    for x in [*wrong, normal(4, 1024).float(), normal(4, 1024).half()]:
        assert not cuda.takes_few_rows(x, weight)
    assert not cuda.takes_few_rows(normal(4, 1024), normal(64, 2048)[:, :1024])
    assert not cuda.takes_few_rows(normal(4, 60), normal(64, 60))
    vocabulary = torch.empty(cuda.MOST_WEIGHTS // 1024 + 1, 1024, dtype=torch.bfloat16, device=DEVICE)
    assert not cuda.takes_few_rows(normal(4, 1024), vocabulary)
    half = normal(4, 1024).half()
    assert not cuda.takes_few_rows(half, weight.half(), normal(1024).half())
    backend.use(backend.FASTEST)
    for x in wrong:
        check_near(linear.linear(x, weight), x.double() @ weight.double().t())
    got, stream = norm_linear.norm_linear(None, half, normal(1024).half(), 1e-6, weight.half())
    assert got.shape == (4, 64) and stream is half


def test_both_halves_of_a_layer() -> None:
    """Through the functions that everybody calls, with and without: the same numbers, rounded elsewhere."""
    backend.use(backend.FASTEST)
    x, residual, weight, norm, out = normal(4, 512), normal(4, 1024), normal(96, 1024), normal(1024), normal(1024, 512)
    added, stream = linear.linear_add(x, out, residual)
    got, _ = norm_linear.norm_linear(added, stream, norm, 1e-6, weight)
    assert added is None
    backend.use("torch")
    product, unchanged = linear.linear_add(x, out, residual)
    assert unchanged is residual
    want, _ = norm_linear.norm_linear(product, residual.clone(), norm, 1e-6, weight)
    check_near(got, want.double())
