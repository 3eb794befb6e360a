"""Every CUDA source is compiled for Ampere and Hopper, as the build would: no warning, no spilled register."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from labkit.kernels import build, cuda
from labkit.kernels.tiles import CUDA_TILE
from labkit.paths import shipped

SMALLEST_SHARED = 99 << 10  # bytes of shared memory that a block may have on the smallest chips since 8.0 (8.6, 8.9)


@pytest.mark.slow
@pytest.mark.skipif(build.nvcc() is None, reason="no nvcc here (CUDA toolkit): CUDA sources are not compiled")
@pytest.mark.parametrize("source", cuda.SOURCES)
def test_sources_compile_without_spills(source: str, tmp_path: Path) -> None:
    sources, compiler = shipped("csrc"), build.nvcc()
    assert sources is not None and compiler is not None
    names = [cuda.architecture(capability) for capability in ((8, 0), (9, 0))]
    command = [compiler, *cuda.FLAGS, "--ptxas-options=-v", "-Werror=all-warnings", "-c", str(sources / source)]
    command += [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    run = subprocess.run([*command, "-o", str(tmp_path / "out.o")], capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stderr[-3000:]
    kernels = re.findall(r"Compiling entry function '(\w+)' for 'sm_(\w+)'", run.stderr)
    assert {chip for _, chip in kernels} == set(names)
    assert len(kernels) % len(names) == 0
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", run.stderr)
    assert len(spills) == len(kernels) and set(spills) == {("0", "0")}
    assert "serialized" not in run.stderr  # what ptxas says of wgmma that it could not leave running


def test_tiles_are_the_source_s_and_fit_on_every_chip() -> None:
    sources = shipped("csrc")
    assert sources is not None
    text = (sources / "flash_attention.cu").read_text(encoding="utf-8")
    rows, keys, stages = (int(re.search(rf"\b{name} = (\d+)", text)[1]) for name in ("ROWS", "KEYS", "STAGES"))  # type: ignore[index]
    assert (rows, keys, stages) == (cuda.FLASH_ROWS, CUDA_TILE.tokens, CUDA_TILE.stages)
    ring = stages * 2 * keys * max(cuda.HEAD_DIMS) * 2  # stages of keys and values, tokens of D numbers of 2 bytes
    assert ring + 1024 <= SMALLEST_SHARED
