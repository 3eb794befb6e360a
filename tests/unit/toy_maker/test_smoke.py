"""Every stage, tiny, on a CPU: the folders that come of it run, and a second call has nothing to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.models import toys
from labkit.models.checkpoint import open_checkpoint

SCRIPT = Path(__file__).resolve().parents[3] / "data" / "make_toy.py"


def make(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    where = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args, *where], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_stages(tmp_path: Path) -> None:
    done = make(tmp_path, "all", "--smoke")
    assert done.returncode == 0, done.stderr
    hashes = json.loads((tmp_path / "out" / toys.HASHES.name).read_text())
    for name in ("toy", "toy-draft"):
        folder = tmp_path / "out" / name
        assert open_checkpoint(str(folder)).config.num_kv_heads < open_checkpoint(str(folder)).config.num_heads
        assert set(hashes[name]) >= set(toys.FILES)
        assert {"README.md", "loss.png"} <= {path.name for path in folder.iterdir()}
    assert len(list((tmp_path / "out" / "toy" / "transcripts").iterdir())) == 10

    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*") if path.is_file()}
    again = make(tmp_path, "all", "--smoke")
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before

    real = make(tmp_path, "all", "--device", "cpu")
    assert real.returncode == 1 and "another run's stages" in real.stderr, "it would ship what the smoke run made"


@pytest.mark.parametrize("out", [[], ["--out", str(SCRIPT.parent / "toy" / "..")]])
def test_it_will_not_put_models_of_a_smoke_run_among_the_shipped(out: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), "all", "--smoke", *out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--out" in done.stderr


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    for args, told in ((("stories",), "no CUDA GPU"), (("export", "--device", "cpu"), "run `all`")):
        done = make(tmp_path, *args)
        assert done.returncode == 1 and told in done.stderr and "Traceback" not in done.stderr


def test_a_stage_that_is_none() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "stroies"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "stories, filter" in " ".join(done.stderr.split())
