"""The trace's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.engine.trace import Trace
from labkit.errors import LabkitError


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "trace.jsonl"
    with pytest.raises(LabkitError, match=f"the trace cannot be written to {path}: No such file or directory"):
        Trace(path)
    with pytest.raises(LabkitError, match="Is a directory"):
        Trace(tmp_path)
