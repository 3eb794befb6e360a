"""The first cell of every lesson."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from typing import TYPE_CHECKING

import labkit

if TYPE_CHECKING:
    from labkit.lab.session import Lab


def choose_triton() -> str:
    """Decide how Triton's kernels run in this process, before anything imports triton. Says how, in words.

    Triton reads TRITON_INTERPRET when a kernel is defined; later it is too late.
    """
    import torch

    if importlib.util.find_spec("triton") is None:
        return "no, it is not installed"
    if torch.cuda.is_available():
        return "yes, compiled"
    late = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
    os.environ["TRITON_INTERPRET"] = "1"
    if late:
        return "no, it was imported before this cell: restart the kernel and run this cell first"
    return "yes, in its interpreter (right, but slow: never timed)"


def fix_seeds(seed: int = 0) -> None:
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def begin(number: str) -> Lab:
    triton = choose_triton()

    import torch

    from labkit.kernels import native
    from labkit.lab.machine import this_machine
    from labkit.lab.session import Lab

    fix_seeds()
    machine = this_machine()
    cuda = "yes" if machine.device == "cuda" else "no, there is no CUDA device"
    print(f"labkit {labkit.__version__}, lesson {number}")
    print(f"machine   {machine}")
    cpp = "yes" if native.missing() is None else "no, they could not be built"
    print(f"backends  torch {torch.__version__}: yes · C++ for this CPU: {cpp} · cuda: {cuda}")
    print(f"to learn  triton: {triton}")
    return Lab(number, machine)
