"""`labkit bench kernels` where there is no GPU; its numbers are tested where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from labkit.bench.copying import copy
from labkit.bench.kernels import SCHEMA, KernelRecord, KernelRow, line, measure
from labkit.bench.machine import describe_machine
from labkit.bench.record import write_json
from labkit.errors import LabkitError
from labkit.kernels.jit import interpreted, triton

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_refuses_without_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LabkitError, match="measures a CUDA GPU"):
        measure(torch.device(device), [], print)


def test_a_record_is_written_whole(tmp_path: Path) -> None:
    row = KernelRow("silu_mul", "8 x 1024", "bfloat16", 49152, 2.0, 9.0, "PyTorch's definition", 24.6, 0.006)
    machine = describe_machine()
    record = KernelRecord(
        SCHEMA, "kernels", "2026-11-30T00:00:00+00:00", ["labkit"], machine, "cuda:0", 4300, [row], {"copy_": 4300}
    )
    write_json(record, tmp_path / "new" / "record.json")
    assert msgspec.json.decode((tmp_path / "new" / "record.json").read_bytes(), type=KernelRecord) == record
    assert "silu_mul" in line(row) and "1% of copy" in line(row)


@pytest.mark.skipif(triton is None or not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("count", [1, 1024, 3000])
def test_the_copy_that_all_are_held_against_copies(count: int) -> None:
    source, target = torch.randn(count), torch.zeros(count + 1)
    copy(source, target, block=1024, warps=4)
    assert torch.equal(target[:-1], source) and target[-1] == 0


COMPILE = """
import torch
from labkit.bench import copying
from tests.unit.kernels.cross_compile import Compiled
for capability in (75, 90):
    copying.copy_kernel = Compiled(copying.copy_kernel, capability, lambda name, shared: print(name, shared))
    for block, warps in copying.BLOCKS:
        copying.copy(torch.zeros(3000), torch.zeros(3000), block, warps)
    copying.copy_kernel = copying.copy_kernel.kernel
"""


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_the_copy_compiles_for_gpus(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout.splitlines() == ["copy_kernel 0"] * 8, done.stderr
