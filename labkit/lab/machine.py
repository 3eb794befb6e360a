"""What this machine is, as a lesson prints it and as the learner's measurements are filed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

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


def cpu_name() -> str:
    """As the system names it; the architecture where it does not say."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Machine("cuda", properties.name, cores, threads, properties.total_memory)
    return Machine("cpu", cpu_name(), cores, threads, psutil.virtual_memory().total)
