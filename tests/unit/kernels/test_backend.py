"""Which device, number format and backend a configuration means here."""

from __future__ import annotations

import pytest
import torch

from labkit.errors import KernelError, ModelError
from labkit.kernels import backend

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def turing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one T4."""
    known = backend.DeviceFacts(GPU, "Tesla T4", (7, 5), torch.float16, 15 << 30, None)
    monkeypatch.setattr(backend, "facts", lambda device: known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_without_a_gpu(no_gpu: None) -> None:
    assert backend.resolve_device("auto") == CPU
    assert backend.resolve_device("cpu") == CPU
    with pytest.raises(ModelError, match="no CUDA GPU"):
        backend.resolve_device("cuda")


def test_with_a_gpu(turing: None) -> None:
    assert backend.resolve_device("auto") == GPU
    assert backend.resolve_device("cuda") == GPU
    assert backend.resolve_device("cpu") == CPU
    with pytest.raises(ModelError, match="cuda:0"):
        backend.resolve_device("cuda:3")


def test_types_on_a_cpu() -> None:
    assert backend.resolve_dtype("auto", CPU) == torch.float32
    assert backend.resolve_dtype("float16", CPU) == torch.float16
    assert backend.resolve_dtype("bfloat16", CPU) == torch.bfloat16


def test_an_old_gpu_has_no_bfloat16(turing: None) -> None:
    assert backend.resolve_dtype("auto", GPU) == torch.float16
    assert backend.resolve_dtype("float32", GPU) == torch.float32
    with pytest.raises(ModelError, match=r"7\.5.*float16"):
        backend.resolve_dtype("bfloat16", GPU)


def test_backends_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert backend.choose("auto", CPU) == backend.choose("torch", CPU) == "torch"
    for name in ("triton", "cuda"):
        with pytest.raises(KernelError, match=f"{name}.*but.*needs a CUDA GPU.*kernels='torch'"):
            backend.choose(name, CPU)
    with pytest.raises(KernelError, match="auto, torch, triton, cuda"):
        backend.choose("metal", CPU)


def test_the_interpreter_is_never_chosen_but_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.choose("auto", CPU) == "torch"
    assert backend.choose("triton", CPU, torch.float16, 80) == "triton"
    with pytest.raises(KernelError, match="bfloat16"):
        backend.choose("triton", CPU, torch.bfloat16)


def test_backends_on_a_gpu(turing: None) -> None:
    pytest.importorskip("triton")
    assert backend.choose("auto", GPU) == backend.choose("triton", GPU, torch.float16, 256) == "triton"
    assert backend.choose("auto", GPU, torch.float16, 320) == "torch"
    with pytest.raises(KernelError, match=r"256.*320"):
        backend.choose("triton", GPU, torch.float16, 320)
    with pytest.raises(KernelError, match=r"8\.0.*T4.*7\.5"):
        backend.choose("cuda", GPU)
    assert not backend.has_tensor_cores(GPU)


def test_too_old_for_triton(turing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    known = backend.DeviceFacts(GPU, "Tesla P100", (6, 0), torch.float16, 16 << 30, None)
    monkeypatch.setattr(backend, "facts", lambda device: known)
    assert backend.choose("auto", GPU) == "torch"
    with pytest.raises(KernelError, match=r"7\.5.*P100.*6\.0"):
        backend.choose("triton", GPU)


def test_facts_of_the_cpu() -> None:
    known = backend.facts(CPU)
    assert known.name and known.threads and known.capability is None and known.default_dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "device", "dtype", "fine"),
    [
        ("triton", "cuda", torch.bfloat16, True),
        ("torch", "cuda", torch.bfloat16, False),
        ("torch", "cuda", torch.float32, False),
        ("torch", "cpu", torch.float32, True),
        ("cpp", "cpu", torch.float32, True),
        ("torch", "cpu", torch.bfloat16, False),
    ],
)
def test_who_can_be_batch_invariant(name: str, device: str, dtype: torch.dtype, fine: bool) -> None:
    if fine:
        backend.check_invariant(name, torch.device(device), dtype)
    else:
        with pytest.raises(KernelError, match=f"kernels {name!r} and .* on {device}.*use Triton's"):
            backend.check_invariant(name, torch.device(device), dtype)
