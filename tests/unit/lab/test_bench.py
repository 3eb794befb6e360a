"""Timings: medians, rates from bytes and FLOPs, and no time for a kernel that Python interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import pytest

from labkit.lab.bench import Timing, bench

KERNEL = """
import torch, triton, triton.language as tl
from labkit.lab.bench import bench

@triton.jit
def add_one(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i) + 1)

x = torch.zeros(16)
timing = bench(lambda: add_one[(1,)](x, 16), label="kernel", budget=0.01)
assert x[0] == 1, "it ran once, to find out"
assert timing.seconds is None
plain = bench(lambda: x + 1, label="torch", budget=0.01)
assert plain.seconds > 0, "what is not Triton is timed, in the same process"
"""


def test_rates() -> None:
    timing = Timing("x", 0.5, bytes=2e9, flops=3e9)
    assert timing.bandwidth == 4e9
    assert timing.flop_rate == 6e9
    assert "4.0 GB/s" in str(timing)
    assert "6.0 GFLOP/s" in str(timing)
    assert Timing("x", 0.5).bandwidth is None


def test_median_leaves_the_outlier_out(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def work() -> None:
        calls.append(0)
        time.sleep(0.05 if len(calls) == 5 else 0.001)

    timing = bench(work, budget=0.02)
    assert timing.seconds is not None
    assert timing.seconds < 0.02 < timing.slowest
    assert timing.runs >= 5
    assert len(calls) == timing.runs + 2, "the warm-up is not counted"
    assert "work" in capsys.readouterr().out


def test_fresh_arguments_for_each_call() -> None:
    made, seen = [], []

    def fresh() -> tuple[int]:
        made.append(len(made))
        return (made[-1],)

    bench(seen.append, fresh=fresh, budget=0)
    assert seen == made
    assert len(set(seen)) == len(seen)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_interpreter_is_not_timed() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", kernel_file()], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernel" in done.stdout
    assert "not measured on this machine" in done.stdout


def kernel_file() -> str:
    # Triton reads a kernel's source from its file, so the program has to be one.
    write_and_run = f"    f.write({KERNEL!r}); f.flush(); runpy.run_path(f.name)"
    return f"import tempfile, runpy\nwith tempfile.NamedTemporaryFile('w', suffix='.py') as f:\n{write_and_run}"
