"""What holds for every test: few threads, no network, and skips that say what was missing.

The environment is set here, before any test imports torch, triton or tokenizers, which read it once.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that each start a thread for every core are slower than one alone.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")


def has_cuda() -> bool:
    # Asking torch costs seconds, so ask it only where there may be a GPU.
    places = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
    if shutil.which("nvidia-smi") is None and not any(map(os.path.exists, places)):
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def torch_kernels() -> Iterator[None]:
    """No test finds the backend that another one's model has left behind."""
    yield
    if "labkit.kernels.backend" in sys.modules:
        sys.modules["labkit.kernels.backend"].use("torch")


HAS_CUDA = has_cuda()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
