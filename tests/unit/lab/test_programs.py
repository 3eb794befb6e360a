"""The trace of a launch: the same numbers as Triton's, every access noted; and kernels where there is no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from labkit.lab.exercises import find_exercise
from labkit.lab.exercises.ex01 import DEVICE
from labkit.lab.programs import Trace, tl, trace, triton

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from labkit.lab.bench import bench
from labkit.lab.check import judge
from labkit.lab.exercises import exercises_of
from labkit.lab.programs import triton

for exercise in exercises_of("01").values():
    assert judge(exercise, exercise.define(exercise.stub)).passed is None
    assert judge(exercise, exercise.define(exercise.solution)).passed is True
    for wrong in exercise.wrong:
        assert judge(exercise, exercise.define(wrong.source)).message == wrong.message, wrong.name
kernel = exercises_of("01")["01.3"].define(exercises_of("01")["01.3"].solution)
x = torch.ones(2, 4)
timing = bench(lambda: kernel[(triton.cdiv(4, 2),)](x, x[0], x, 4, 1e-6, BLOCK=4), budget=0)
assert timing.seconds is None, "the stand-in is not timed either"
"""


def kernel_of(id: str) -> Any:
    exercise = find_exercise(id)
    return exercise.define(exercise.solution)


def norm(rows: int = 3, width: int = 5) -> tuple[Trace, torch.Tensor]:
    x, out = torch.arange(1.0, rows * width + 1).view(rows, width), torch.zeros(rows, width)
    return trace(kernel_of("01.3"), (rows,), x, torch.ones(width), out, width, 1e-6, BLOCK=8), out


def test_every_access_is_noted() -> None:
    noted, _ = norm()
    assert noted.programs == 3
    assert noted.shapes == {"x": (3, 5), "weight": (5,), "out": (3, 5)}
    assert [(a.program, a.kind, a.tensor) for a in noted.accesses[:4]] == [
        (0, "load", "x"),
        (0, "load", "weight"),
        (0, "store", "out"),
        (1, "load", "x"),
    ]
    second = noted.accesses[3]
    assert second.places == tuple(range(5, 13))
    assert second.mask == (True,) * 5 + (False,) * 3
    assert second.used() == [5, 6, 7, 8, 9]
    assert second.line == "value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)"
    assert noted.outside() == []


def test_bytes() -> None:
    noted, _ = norm()
    assert noted.bytes_asked() == 3 * 3 * 5 * 4
    assert noted.bytes_moved() == (2 * 3 * 5 + 5) * 4, "the weight once"


@pytest.mark.parametrize("width", [1, 5, 8])
def test_same_numbers_as_triton(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, stream, weight = torch.randn(4, width, generator=generator), torch.randn(4, width), torch.randn(width)
    kernel, block = kernel_of("01.4"), triton.next_power_of_2(width)
    theirs, there = torch.empty(4, width, device=DEVICE), stream.to(DEVICE, copy=True)
    kernel[(4,)](x.to(DEVICE), there, weight.to(DEVICE), theirs, width, 1e-6, BLOCK=block)
    ours, here = torch.empty(4, width), stream.clone()
    trace(kernel, (4,), x, here, weight, ours, width, 1e-6, BLOCK=block)
    assert torch.allclose(ours, theirs.cpu(), atol=1e-6)
    assert torch.equal(here, there.cpu())
    assert torch.equal(here, stream + x)


def test_what_leaves_the_tensor() -> None:
    def no_masks(x: Any, out: Any, BLOCK: tl.constexpr) -> None:
        place = tl.program_id(0) * 3 + tl.arange(0, BLOCK)
        tl.store(out + place, tl.load(x + place))

    out = torch.zeros(2, 3)
    noted = trace(no_masks, (2,), torch.ones(2, 3), out, BLOCK=4)
    assert [(a.program, a.tensor) for a in noted.outside()] == [(1, "x"), (1, "out")]
    assert out.tolist() == [[1.0] * 3] * 2, "and nothing behind the tensor was touched"


def test_axes_and_counts() -> None:
    def numbered(out: Any) -> None:
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(out + place, tl.program_id(0) + 10 * tl.program_id(1))

    out = torch.zeros(2, 3)
    noted = trace(numbered, (3, 2), out)
    assert out.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert [a.program for a in noted.accesses] == list(range(6))


def test_refusals() -> None:
    def three(out: Any) -> None:
        tl.store(out + tl.arange(0, 3), 1)

    with pytest.raises(ValueError, match="power of 2"):
        trace(three, (1,), torch.zeros(3))
    with pytest.raises(ValueError, match="out is not contiguous"):
        trace(three, (1,), torch.zeros(3, 2).t())


def test_without_triton() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not measured on this machine" in done.stdout
