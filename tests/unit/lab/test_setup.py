"""The first cell: Triton's mode is decided before triton is imported, in a fresh process as in a notebook."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from labkit.lab import colab


def run(program: str, **env: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""} | env
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_lab_imports_no_torch() -> None:
    out = run("import sys; from labkit.lab import setup; print('torch' in sys.modules, 'triton' in sys.modules)")
    assert out.split() == ["False", "False"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_interpreter_without_cuda() -> None:
    out = run("from labkit.lab import setup; lab = setup('00'); import os; print(os.environ['TRITON_INTERPRET'])")
    assert out.startswith("labkit ")
    assert "lesson 00" in out
    assert "no CUDA device" in out
    assert "in its interpreter" in out
    assert out.split()[-1] == "1"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_too_late_is_said() -> None:
    assert "restart the kernel" in run("import triton; from labkit.lab import setup; setup('00')")


def test_seeds() -> None:
    program = (
        "from labkit.lab import setup; setup('00'); import torch, random; print(torch.rand(1).item(), random.random())"
    )
    assert run(program).splitlines()[-1] == run(program).splitlines()[-1]


def test_colab_installs_only_what_is_missing() -> None:
    have = {"torch": "2.11.0", "numpy": "2.0", "jinja2": "3.1"}
    wanted = colab.missing(
        ["torch>=2.9", "Jinja2>=3.1", "huggingface_hub>=0.34", "triton; platform_system == 'Linux'"], have
    )
    assert wanted == ["huggingface_hub>=0.34"]
    assert colab.constraints(have) == ["torch==2.11.0", "numpy==2.0"]
    assert colab.name_of("Foo_bar.baz[x]>=1; y") == "foo-bar-baz"
