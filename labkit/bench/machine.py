"""Which machine, software and commit a number belongs to."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

PACKAGES = ("torch", "triton", "transformers", "llama-cpp-python", "vllm", "numpy")


class Gpu(msgspec.Struct, frozen=True):
    """A GPU as found. Clocks are those of the moment (MHz), None where the driver does not tell."""

    name: str
    memory_bytes: int
    compute_capability: str
    driver: str | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None


class Machine(msgspec.Struct, frozen=True):
    """What a measurement depends on besides the code. Packages that are not installed are None."""

    cpu: str
    cores: int  # that this process may use
    threads: int  # that torch uses, and the peers with it
    ram_bytes: int
    os: str
    python: str
    packages: dict[str, str | None]
    cuda: str | None
    gpus: list[Gpu]
    commit: str | None  # None outside a git checkout
    tree_clean: bool | None
    load_average: list[float]  # over 1, 5 and 15 minutes, just before measuring: a busy machine shows here


def describe_machine() -> Machine:
    """Look at the machine as it is now."""
    import torch  # here, not above: processes that only send requests import this module too, and do not need it

    commit, clean = _git_state()
    return Machine(
        cpu=_cpu_name(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        ram_bytes=psutil.virtual_memory().total,
        os=platform.platform(),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        cuda=torch.version.cuda if torch.cuda.is_available() else None,
        gpus=_gpus(),
        commit=commit,
        tree_clean=clean,
        load_average=[round(x, 2) for x in psutil.getloadavg()],
    )


def usable_cores() -> int:
    """Cores this process may run on; fewer than the machine has in a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    """ "Intel(R) Xeon(R) Processor", where `platform` knows only "x86_64"."""
    if platform.system() == "Darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem"
    rows = (_output_of("nvidia-smi", query, "--format=csv,noheader,nounits") or "").splitlines()
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        # nvidia-smi lists all cards, torch those it was given: take the clocks only when both see the same number.
        fields = [f.strip() for f in rows[index].split(",")] if len(rows) == torch.cuda.device_count() else []
        driver, sm, memory = fields if len(fields) == 3 else (None, None, None)
        gpus.append(
            Gpu(
                name=properties.name,
                memory_bytes=properties.total_memory,
                compute_capability=f"{properties.major}.{properties.minor}",
                driver=driver,
                sm_clock_mhz=int(sm) if sm and sm.isdecimal() else None,
                memory_clock_mhz=int(memory) if memory and memory.isdecimal() else None,
            )
        )
    return gpus


def _git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout this package lies in, and whether nothing in it was changed or added."""
    folder = str(Path(__file__).parent)
    commit = _output_of("git", "-C", folder, "rev-parse", "HEAD")
    if commit is None:
        return None, None
    # ":/" is the whole checkout, wherever in it we are. Data is left out: the record itself is written there.
    changes = _output_of("git", "-C", folder, "status", "--porcelain", "--", ":/", ":(exclude,top)data/recorded")
    return commit, changes == "" if changes is not None else None


def _output_of(*command: str) -> str | None:
    """What a command prints, None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
