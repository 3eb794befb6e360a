"""What the cuda backend says where it cannot run, and what it hands to the library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from labkit import doctor
from labkit.errors import KernelError
from labkit.kernels import backend, build, cuda, few_decodes, linear, norm_linear, prefill_attention, rms_norm
from labkit.kernels.attention_batch import AttentionBatch
from labkit.kernels.tiles import CUDA_TILE
from labkit.paths import shipped

GPU = torch.device("cuda", 0)
AMPERE = (8, 0)


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    known = backend.DeviceFacts(GPU, name, capability, torch.bfloat16, 80 << 30, None)
    monkeypatch.setattr(backend, "facts", lambda device: known)


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    cuda.load.cache_clear()


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert backend.unavailable("cuda", torch.device("cpu")) == "it needs a CUDA GPU, and the device is cpu"
    gpu(monkeypatch, "Tesla T4", (7, 5))
    assert backend.unavailable("cuda", GPU) == "it needs compute capability 8.0, and Tesla T4 has 7.5"
    gpu(monkeypatch, "A100", AMPERE)
    monkeypatch.setattr(cuda, "load", lambda capability: None)
    assert backend.unavailable("cuda", GPU, torch.bfloat16, 128) is None
    assert backend.choose("cuda", GPU, torch.float16, 64) == "cuda"
    assert "float32" in str(backend.unavailable("cuda", GPU, torch.float32, 128))
    assert "64 or 128 numbers, and these have 80" in str(backend.unavailable("cuda", GPU, torch.bfloat16, 80))
    monkeypatch.setattr(cuda, "load", lambda capability: "nvcc fell over")
    with pytest.raises(KernelError, match="kernels is 'cuda', but nvcc fell over; use"):
        backend.choose("cuda", GPU, torch.bfloat16, 128)
    assert backend.choose("auto", GPU, torch.bfloat16, 128) == "triton"
    monkeypatch.setattr(cuda, "load", lambda capability: None)
    assert backend.choose("auto", GPU, torch.bfloat16, 80) == backend.FASTEST
    assert backend.choose("auto", GPU, torch.float32, 128) == backend.choose("triton", GPU, torch.bfloat16) == "triton"


def test_without_nvcc(monkeypatch: pytest.MonkeyPatch, no_nvcc: None) -> None:
    pytest.importorskip("triton")
    gpu(monkeypatch, "A100", AMPERE)
    assert build.nvcc() is None
    assert "no CUDA compiler found" in str(backend.unavailable("cuda", GPU, torch.bfloat16, 128))


def test_the_doctor_says_what_cuda_means_and_why_not(monkeypatch: pytest.MonkeyPatch, no_nvcc: None) -> None:
    pytest.importorskip("triton")
    gpu(monkeypatch, "A100", AMPERE)
    assert dict(doctor._fallbacks(GPU))["kernels cuda"].startswith("refused: no CUDA compiler found")
    monkeypatch.setattr(cuda, "load", lambda capability: None)
    assert dict(doctor._fallbacks(GPU))["kernels cuda"].startswith("few rows' operations, RMSNorm and")


def test_operations_go_there_when_it_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cuda, "rms_norm", lambda x, weight, eps: calls.append("norm") or x)
    monkeypatch.setattr(cuda, "add_rms_norm", lambda x, residual, weight, eps: calls.append("add") or (x, residual))
    x = torch.ones(2, 8)
    rms_norm.rms_norm(x, x[0], 1e-6)
    backend.use("cuda")
    rms_norm.rms_norm(x, x[0], 1e-6)
    rms_norm.add_rms_norm(x, x, x[0], 1e-6)
    assert calls == ["norm", "add"]
    assert backend.on_triton()  # what has no version in CUDA C++


def test_products_of_a_layer_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual sum is in the product then, and the norm in the next one; what it does not take is done as ever."""
    calls: list[str] = []

    def few_rows(x: Tensor, weight: Tensor, *others: object, residual: Tensor | None = None) -> Tensor:
        calls.append("add" if residual is not None else "norm" if len(others) > 1 else "plain")
        return x.new_zeros(x.shape[0], weight.shape[0])

    monkeypatch.setattr(cuda, "few_rows", few_rows)
    monkeypatch.setattr(cuda, "takes_few_rows", lambda x, weight, norm=None: x.shape[0] == 4)
    monkeypatch.setattr(linear, "_on_gpu", lambda x, weight: torch.nn.functional.linear)
    weight, norm = torch.ones(8, 8), torch.ones(8)
    for rows, name, invariant in ((4, backend.FASTEST, False), (4, "cuda", False), (9, backend.FASTEST, False)):
        backend.use(name, invariant)
        stream = torch.ones(rows, 8)
        x, added = linear.linear_add(stream, weight, stream)
        assert (x is None) == (rows == 4) and (added is stream) == (rows != 4)
        if rows == 4:
            norm_linear.norm_linear(None, added, norm, 1e-6, weight)
            linear.linear(added, weight)
    assert calls == ["add", "norm", "plain"] * 2
    backend.use(backend.FASTEST, True)
    assert not backend.few_rows_on_cuda()


def test_arguments_are_in_the_order_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes would pass anything: names and types are compared with the C functions' own."""
    sources = shipped("csrc")
    assert sources is not None
    text = "".join((sources / name).read_text(encoding="utf-8") for name in cuda.SOURCES)
    kinds = {"int64_t": cuda.SIZE, "float": cuda.FLOAT}
    for name, types in cuda.FUNCTIONS.items():
        found = re.search(rf'extern "C" int {name}\((.*?)\) {{', text, re.DOTALL)
        assert found is not None
        parameters = [" ".join(parameter.split()) for parameter in found[1].split(",")]
        assert len(parameters) == len(types)
        for parameter, given in zip(parameters, types, strict=True):
            pointer = cuda.ctypes.POINTER(cuda.SIZE) if "int64_t* steps" in parameter else cuda.POINTER
            assert given == (pointer if "*" in parameter else kinds[parameter.split()[0]]), parameter

    calls = {}
    monkeypatch.setattr(cuda, "call", lambda name, device, *arguments: calls.setdefault(name, arguments))
    x = torch.ones(2, 8)
    cuda.add_rms_norm(x, x, x[0], 1e-6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda.few_rows(x, torch.ones(6, 8), norm=x[0], eps=1e-6, gated=True, residual=x[:, :3])
    pool, ints = torch.zeros(2, 16, 2, 64, dtype=torch.float16), torch.ones(1, dtype=torch.int32)
    tables: Tensor = torch.zeros(1, 2, dtype=torch.int32)
    prompts = prefill_attention.make_prompts(CUDA_TILE, 2, 1, tables, ints, ints)
    cuda.flash_attention(torch.zeros(1, 4, 64, dtype=torch.float16), pool, pool, prompts)
    decodes, qkv = AttentionBatch(ints.long(), tables, ints, 1), torch.zeros(1, 8 * 64, dtype=torch.float16)
    few_decodes.few_decodes(qkv, ints, torch.zeros(2, 64), pool, pool, decodes)
    for name, types in cuda.FUNCTIONS.items():
        assert len(calls[name]) == len(types) - 1  # the stream
