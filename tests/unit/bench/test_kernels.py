"""`labkit bench kernels` where there is no GPU; its numbers are tested where there is one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from labkit.bench.kernels import SCHEMA, KernelRecord, KernelRow, line, measure
from labkit.bench.machine import describe_machine
from labkit.bench.record import write_json
from labkit.errors import LabkitError


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_refuses_without_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LabkitError, match="measures a CUDA GPU"):
        measure(torch.device(device), [], print)


def test_a_record_is_written_whole(tmp_path: Path) -> None:
    row = KernelRow("silu_mul", "8 x 1024", "bfloat16", 49152, 2.0, 9.0, "PyTorch's definition", 24.6, 0.006)
    record = KernelRecord(
        SCHEMA, "kernels", "2026-11-30T00:00:00+00:00", ["labkit"], describe_machine(), "cuda:0", 4300, [row]
    )
    write_json(record, tmp_path / "new" / "record.json")
    assert msgspec.json.decode((tmp_path / "new" / "record.json").read_bytes(), type=KernelRecord) == record
    assert "silu_mul" in line(row) and "1% of copy" in line(row)
