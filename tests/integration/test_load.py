"""`labkit bench serve` and `labkit bench soak` against `labkit serve toy`, as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from labkit.bench.load.record import ServeRecord, SoakRecord
from labkit.bench.reading import read_record

ENGINE = ["--engine", "device=cpu", "--engine", "num_kv_blocks=256"]


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "labkit", "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


@pytest.mark.slow
def test_a_soak_of_twenty_seconds(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    done = bench("soak", "--clients", "12", "--seconds", "20", "--out", str(path), *ENGINE)
    assert path.exists(), done.stderr
    record = read_record(path)
    assert isinstance(record, SoakRecord)
    assert [(check.name, check.found) for check in record.checks if not check.passed] == [], record.wrong
    assert done.returncode == 0 and len(record.checks) == 7
    assert {name.partition(":")[0] for name in record.outcomes} == {"read", "leave", "dawdle", "nonsense"}
    assert max(sample.gauges["labkit_num_requests_running"] for sample in record.samples) > 0


@pytest.mark.slow
def test_a_load_beside_the_engine_without_http(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    load = ["--workload", "http2", "--requests", "4", "--repeats", "1", "--offline"]
    done = bench("serve", *load, "--out", str(path), *ENGINE)
    assert done.returncode == 0, done.stderr
    record = read_record(path)
    assert isinstance(record, ServeRecord)
    served, offline = record.runs
    assert (served.engine, offline.engine) == ("labkit", "offline")
    lengths = [[(t.prompt_tokens, t.output_tokens) for t in run.requests] for run in record.runs]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 4, "the same requests"
    assert served.summary.errors == {} and served.summary.queue_ms is not None
    check = record.token_checks["labkit"]
    assert check.listed == check.usage and check.chunks <= check.listed
    (row,) = record.comparisons
    assert row["workload"] == "http2" and row["ratio"] > 0
