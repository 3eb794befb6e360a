"""Builds csrc/ with this machine's own compilers on first use, and keeps the libraries in the user's cache.

The sources know nothing of PyTorch: they take pointers and sizes, so they compile in seconds and a reader needs no
other library to follow them. PyTorch's extension builder calls the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from labkit.paths import cache_folder, shipped

Signatures = Mapping[str, tuple[Any, ...]]  # the types of each function's arguments


@dataclass(frozen=True)
class Recipe:
    """What a library is made of."""

    name: str
    sources: Sequence[str]  # files of csrc/
    made_for: str  # whom it can serve: a processor's instructions, a GPU's architecture
    announcement: str  # what the user is told while it is built
    options: dict[str, Any] = field(default_factory=dict)  # of torch.utils.cpp_extension.load

    def folder(self, sources: Path) -> Path:
        """Where the library is kept: another source, option, PyTorch or machine makes another one."""
        facts = (self.name, self.sources, self.made_for, sorted(self.options.items()), torch.__version__)
        digest = hashlib.sha256(repr(facts).encode())
        for path in sorted(path for path in sources.iterdir() if path.is_file()):
            digest.update(path.read_bytes())
        return cache_folder() / "build" / digest.hexdigest()[:16]


def library(recipe: Recipe, functions: Signatures, result: Any = None) -> ctypes.CDLL | str:
    """The library, built if it is not there yet, or the reason why there is none. `result`: what functions return."""
    sources = shipped("csrc")
    if sources is None:
        return "csrc/ is not there"
    path = recipe.folder(sources) / f"{recipe.name}.so"
    try:
        if not path.exists():
            _build(recipe, sources, path)
        loaded = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())[:200]
    for name, types in functions.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, result
    return loaded


def _build(recipe: Recipe, sources: Path, path: Path) -> None:
    """Compile to `path`. Raises RuntimeError when there is no compiler, or it fails."""
    print(f"labkit: {recipe.announcement}, once", file=sys.stderr, flush=True)
    from torch.utils import cpp_extension  # slow to import, and needed once

    path.parent.mkdir(parents=True, exist_ok=True)
    # Built elsewhere and moved into place whole: a build that is killed leaves nothing that others wait for or load.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        cpp_extension.load(
            name=recipe.name,
            sources=[str(sources / name) for name in recipe.sources],
            build_directory=scratch,
            is_python_module=False,
            **recipe.options,
        )
        # The builder numbers the file when one process builds twice.
        os.replace(next(Path(scratch).glob(f"{recipe.name}*.so")), path)


def nvcc() -> str | None:
    """The CUDA compiler, looked for where PyTorch's builder looks; None if there is none."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            return shutil.which("nvcc", path=f"{home}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
