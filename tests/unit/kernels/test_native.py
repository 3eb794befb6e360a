"""The C++ operations against the PyTorch definitions: odd sizes, strides, paged reads; and a machine without them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labkit.config import RopeConfig
from labkit.kernels import activation, backend, decode_attention, linear, native, rms_norm, rope
from labkit.kernels.attention_batch import AttentionBatch
from labkit.paths import shipped

needs_cpp = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@pytest.fixture(autouse=True)
def torch_is_current() -> Iterator[None]:
    """The definitions run unless a test says otherwise."""
    before = backend.current
    backend.use("torch")
    yield
    backend.use(before)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_compiler_means_that_it_builds() -> None:
    if shutil.which("c++") is not None:
        assert native.missing() is None
        assert backend.choose("auto", torch.device("cpu"), torch.float32) == "cpp"
    assert backend.choose("torch", torch.device("cpu"), torch.float32) == "torch"
    assert backend.choose("auto", torch.device("cpu"), torch.bfloat16) == "torch"


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "/bin/false"])
def test_without_a_compiler_torch_runs_and_the_reason_is_known(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    native.load.cache_clear()
    try:
        assert native.missing()
        assert backend.choose("auto", torch.device("cpu"), torch.float32) == "torch"
    finally:
        monkeypatch.undo()
        native.load.cache_clear()


@needs_cpp
def test_what_a_killed_build_left_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    sources = shipped("csrc")
    assert sources is not None
    folder = native.recipe().folder(sources)
    assert folder.is_relative_to(tmp_path)
    (folder / "tmpkilled").mkdir(parents=True)
    for name in ("lock", "tmpkilled/lock", "tmpkilled/labkit_cpu.so"):
        (folder / name).touch()
    native.load.cache_clear()
    try:
        assert native.missing() is None
        assert (folder / "labkit_cpu.so").stat().st_size > 10_000
    finally:
        native.load.cache_clear()


@needs_cpp
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (15, 7), (16, 8), (33, 9), (576, 25)])
def test_linear(rows: int, inner: int, outer: int) -> None:
    x, weight, bias = noise(rows, inner), noise(outer, inner), noise(outer)
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for given, b, expected in ((x, bias, want), (x, None, want - bias)):
        torch.testing.assert_close(native.linear(given, weight, b).double(), expected.double(), rtol=1e-5, atol=2e-5)
    apart = noise(rows, inner + 3)[:, :inner]
    transposed = noise(inner, rows).t()
    for given in (apart, transposed):
        torch.testing.assert_close(native.linear(given, weight, None), given @ weight.t(), rtol=1e-5, atol=5e-5)


@needs_cpp
def test_company_does_not_change_a_row_of_linear() -> None:
    x, weight = noise(13, 577), noise(31, 577)
    alone = torch.cat([native.linear(row.unsqueeze(0), weight, None) for row in x])
    for count in (2, 4, 5, 8, 13):
        assert torch.equal(native.linear(x[:count], weight, None), alone[:count])


@needs_cpp
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 37])
@pytest.mark.parametrize("width", [1, 15, 64, 577])
def test_norms(rows: int, width: int) -> None:
    x, residual, weight = noise(rows, width), noise(rows, width) * 3, noise(width)
    want, total = rms_norm.add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(native.rms_norm(total, weight, 1e-5), want, rtol=1e-5, atol=1e-5)
    for given in (x, x.t().contiguous().t()):
        got, stream = native.add_rms_norm(given, residual.clone(), weight, 1e-5)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(stream, total)


@needs_cpp
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("width", [1, 17, 96, 1000])
def test_silu_mul(rows: int, width: int) -> None:
    gate_up = noise(rows, 2 * width) * 20  # far into both tails
    if rows and width > 3:
        gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    want = activation.silu_mul(gate_up.clone())
    for given in (gate_up, gate_up.t().contiguous().t()):
        torch.testing.assert_close(native.silu_mul(given), want, rtol=2e-6, atol=1e-6)


@needs_cpp
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("head_dim", [2, 24, 64, 80])
def test_rope(tokens: int, head_dim: int) -> None:
    table = rope.rope_table(RopeConfig(), head_dim, 100, torch.device("cpu"))
    positions = torch.randperm(100)[:tokens].int()
    rows = noise(tokens, 9 * head_dim)  # queries and keys lie side by side, so tokens are apart
    q, k = rows.view(-1, 9, head_dim).split((6, 3), dim=1)
    for got, want in zip(
        (native.rope(q, positions, table), native.rope(k, positions.long(), table)),
        rope.apply_rope(q, k, positions, table),
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@needs_cpp
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (7, 1, 24), (4, 4, 80), (6, 2, 17)])
@pytest.mark.parametrize("window", [None, 1, 8, 20, 500])
def test_decode_attention(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    lengths, block_size = [1, 15, 16, 17, 33, 63], 16
    generator = torch.Generator().manual_seed(3)
    tables = torch.randperm(40, generator=generator)[: 6 * 4].view(6, 4).int()
    k_cache, v_cache = noise(41, block_size, kv_heads, head_dim), noise(41, block_size, kv_heads, head_dim) + 1
    q = noise(6, heads + 2, head_dim)[:, :heads]  # rows apart, as they are in the output of QKV
    batch = AttentionBatch(torch.arange(6), tables, torch.tensor(lengths, dtype=torch.int32), 63)
    want = decode_attention.decode_attention(q, k_cache, v_cache, batch, window)
    got = native.decode_attention(q, k_cache, v_cache, tables, batch.context_lens, window)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@needs_cpp
def test_operations_go_to_cpp_only_when_it_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(native, "linear", lambda x, w, b: calls.append("linear") or x @ w.t())
    linear.linear(noise(3, 8), noise(4, 8))
    assert not calls
    backend.use("cpp")
    linear.linear(noise(3, 8), noise(4, 8))
    linear.linear(noise(40, 8), noise(4, 8))  # too many rows
    linear.linear(noise(3, 8).double(), noise(4, 8).double())
    assert calls == ["linear"]


@needs_cpp
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("width", [1, 17, 1000])
def test_argmax(rows: int, width: int) -> None:
    x = noise(rows, width + 3)[:, 1 : width + 1]
    if rows and width > 10:
        x[0, 3:9] = x.max() + 1  # a tie goes to the lowest
    if rows > 2:
        x[1] = -torch.inf
        x[2, : width // 2] = -torch.inf
    assert torch.equal(native.argmax(x), torch.from_numpy(x.numpy().argmax(-1)))
