"""What PyTorch runs and moves, and what was recorded elsewhere."""

from __future__ import annotations

import pytest
import torch

from labkit.bench.kernels import KernelRecord
from labkit.lab.plain import rms_norm
from labkit.lab.recorded import recorded
from labkit.lab.traffic import Operation, peak, traffic


def test_traffic_of_the_plain_norm() -> None:
    operations = traffic(rms_norm, torch.ones(4, 6), torch.ones(6), 1e-6)
    assert [(o.name, o.read, o.written) for o in operations] == [
        ("pow", 96, 96),
        ("mean", 96, 16),
        ("add", 16, 16),
        ("rsqrt", 16, 16),
        ("mul", 112, 96),
        ("mul", 96 + 24, 96),
    ]


def test_views_move_nothing_and_conversions_do() -> None:
    x = torch.ones(4, 6)
    assert traffic(lambda: x.view(6, 4).t()[1:]) == []
    assert traffic(lambda: torch.empty(1000)) == []
    assert traffic(lambda: x.bfloat16()) == [Operation("_to_copy", 96, 48)]
    assert str(Operation("mul", 1234, 5)) == f"{'mul':<20} reads {'1,234':>12} bytes, writes {'5':>12}"


def test_recorded_says_where_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    record = recorded("h200-kernels")
    assert isinstance(record, KernelRecord)
    out = capsys.readouterr().out
    assert out.startswith("h200-kernels-")
    assert f"NVIDIA H200, torch {record.machine.packages['torch']}, measured on {record.date[:10]}" in out


def test_nothing_recorded() -> None:
    with pytest.raises(ValueError, match="no record 'h200'"):
        recorded("h200")


def test_peak_counts_what_is_held_at_once() -> None:
    x = torch.zeros(1000)  # 4,000 bytes
    assert peak(lambda a: a + 1, x) == 4000
    assert peak(lambda a: (a + 1) * 2, x) == 8000  # the sum is still held while the product is made
    assert peak(lambda a: [a + 1, a + 2, a + 3], x) == 12000
    assert peak(lambda a: [(a + n).sum() for n in range(9)], x) < 4100  # one after the other


def test_peak_does_not_count_what_was_there() -> None:
    x = torch.zeros(1000)
    assert peak(lambda a: a.view(10, 100)[2:].t(), x) == 0
    assert peak(lambda a: a.add_(1), x) == 0
    assert peak(lambda a: (a + 1).view(10, 100), x) == 4000
