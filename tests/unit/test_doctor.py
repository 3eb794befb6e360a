"""What `labkit doctor` says, on this machine and on machines that lack something."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

from labkit import doctor
from labkit.kernels import backend

CPU = torch.device("cpu")


def test_every_heading_has_its_facts():
    facts = dict(doctor.examine())
    assert list(facts) == ["Machine", "GPU", "Number formats", "Kernels", "What falls back"]
    assert all(text.strip() for group in facts.values() for _, text in group)
    assert dict(facts["What falls back"])["kernels auto"].split()[0] in ("cpp", *backend.BACKENDS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton for this system")
def test_triton_is_tried_and_the_environment_left_alone(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "works in its interpreter" in doctor._triton(CPU)
    assert "TRITON_INTERPRET" not in os.environ


def test_a_triton_that_fails_is_told_in_one_line(monkeypatch):
    class Broken:
        def adds_one(self, device: torch.device) -> bool:
            raise RuntimeError("no\n  C compiler")

    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "labkit.triton_probe", Broken())
    assert "fails (RuntimeError: no C compiler) in its interpreter" in doctor._triton(CPU)


def test_no_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor._triton(CPU) == "not installed"


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor._cpp_compiler().startswith("no C++ compiler")
    assert doctor._nvcc() == "no CUDA compiler found"
    monkeypatch.setenv("CXX", "my-c++")
    assert "'my-c++', which is not found" in doctor._cpp_compiler()


def test_an_old_gpu_refuses_bfloat16(monkeypatch):
    t4 = backend.DeviceFacts(torch.device("cuda", 0), "Tesla T4", (7, 5), torch.float16, 15 * 2**30, None)
    monkeypatch.setattr(backend, "facts", lambda device: t4)
    formats = dict(doctor._dtypes(t4.device))
    assert formats["float16"] == formats["float32"] == "runs"
    assert formats["bfloat16"].startswith("refused: ") and "7.5" in formats["bfloat16"]


def test_a_hidden_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor._gpus() == [("GPU", "none: CUDA_VISIBLE_DEVICES hides it")]
