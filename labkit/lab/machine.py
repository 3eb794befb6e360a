"""What this machine is, as a lesson prints it and as the learner's measurements are filed."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from labkit.kernels import backend

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """One box: the device the lessons measure, and the CPU beside it."""

    device: str  # cpu or cuda
    chip: str  # of that device
    cores: int  # that this process may use
    threads: int  # that torch uses
    memory_bytes: int  # of that device

    @property
    def key(self) -> str:
        """Under this name measurements are kept: the same box with other threads is another box."""
        return f"{self.chip}, {self.threads} threads" if self.device == "cpu" else self.chip

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / GIB:.0f} GiB"
        if self.device == "cpu":
            return f"{self.chip}, {self.cores} cores ({self.threads} used), {memory}, no CUDA device"
        return f"{self.chip}, {memory}"


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    device = backend.resolve_device("auto")
    known = backend.facts(device)
    return Machine(device.type, known.name, cores, threads, known.memory_bytes or psutil.virtual_memory().total)
