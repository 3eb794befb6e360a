"""What this machine can run, found out by asking and by trying: the facts behind `labkit doctor`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
import torch

from labkit.errors import LabkitError, counted
from labkit.kernels import backend, build, native

Fact = tuple[str, str]  # name and what is to be said of it
GIB = 2**30


def examine() -> list[tuple[str, list[Fact]]]:
    """Headings with their facts, in the order to be read. A fact that cannot be found out says why."""
    device = backend.resolve_device("auto")
    return [
        ("Machine", _machine()),
        ("GPU", _gpus()),
        ("Number formats", _dtypes(device)),
        ("Kernels", _kernels(device)),
        ("What falls back", _fallbacks(device)),
    ]


# --------------------------------------------------------------------------- machine


def _machine() -> list[Fact]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    limit = container_memory_limit()
    in_container = f", this container may use {limit / GIB:.1f} GiB" if limit and limit < memory.total else ""
    return [
        (
            "CPU",
            f"{backend.cpu_name() or platform.processor() or platform.machine()}, {usable} cores for this process",
        ),
        ("instructions", torch.backends.cpu.get_cpu_capability()),
        (
            "RAM",
            f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB free{in_container}",
        ),
        (
            "system",
            f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        ),
        ("torch", f"{torch.__version__}, {counted(torch.get_num_threads(), 'thread')}"),
    ]


def container_memory_limit() -> int | None:
    """Bytes that the control group (a container, a batch job) allows; None without a limit."""
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(path).read_text())  # "max" is no number
    return None


def _gpus() -> list[Fact]:
    if not torch.cuda.is_available():
        return [("GPU", f"none: {_why_no_gpu()}")]
    facts = []
    for index in range(torch.cuda.device_count()):
        known = backend.facts(torch.device("cuda", index))
        assert known.capability is not None and known.memory_bytes is not None
        major, minor = known.capability
        memory = known.memory_bytes / GIB
        facts.append(
            (
                f"GPU {index}",
                f"{known.name}, compute capability {major}.{minor}, {memory:.1f} GiB",
            )
        )
    return [*facts, ("CUDA", str(torch.version.cuda)), ("power, clocks", _nvml())]


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides it"
    return "torch finds no NVIDIA GPU or no driver for it"


def _nvml() -> str:
    """Whether the driver tells the power that the first GPU takes, or the driver's reason."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(0).uuid)  # the card that is used, whatever is hidden
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return f"NVML reads them: {pynvml.nvmlDeviceGetPowerUsage(handle) / 1000:.0f} W now"
    except Exception as error:  # no library, no driver, no right, not supported: each has an exception of its own
        return f"not measured: {type(error).__name__}: {error}"


def _dtypes(device: torch.device) -> list[Fact]:
    facts = []
    for name in backend.DTYPES:
        try:
            backend.resolve_dtype(name, device)
            facts.append((name, "runs"))
        except LabkitError as error:
            facts.append((name, f"refused: {error}"))
    return facts


# --------------------------------------------------------------------------- kernels


def _kernels(device: torch.device) -> list[Fact]:
    facts = []
    for name in backend.BACKENDS:
        reason = backend.unavailable(name, device)
        facts.append((f"{name} kernels", "run" if reason is None else f"do not run: {reason}"))
    return [
        *facts,
        ("cpp kernels", "run" if (reason := native.missing()) is None else f"do not run: {reason}"),
        ("Triton", _triton(device)),
        ("compiler", _cpp_compiler()),
        ("nvcc", _nvcc()),
    ]


def _triton(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "not installed"
    where = "in its interpreter" if device.type == "cpu" else f"on {device}"
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1" if device.type == "cpu" else "0"
    try:
        from labkit.triton_probe import adds_one

        works = "works" if adds_one(device) else "gives wrong numbers"
    except Exception as error:  # whatever Triton, the driver or its C compiler raise
        works = f"fails ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    return f"{metadata.version('triton')}, {works} {where}"


def _cpp_compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        path = shutil.which(name)
        if path:
            return f"{path}: {_version_line(path)}"
    return f"CXX is {asked!r}, which is not found" if asked else "no C++ compiler found (c++, g++ or clang++)"


def _nvcc() -> str:
    path = build.nvcc()
    return f"{path}: {_version_line(path, last=True)}" if path else "no CUDA compiler found"


def _version_line(program: str, last: bool = False) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not start ({error})"
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no version told"]
    return lines[-1 if last else 0]


# --------------------------------------------------------------------------- fallbacks


def _fallbacks(device: torch.device) -> list[Fact]:
    """What every "auto" means here, and why it is not something better."""
    dtype = backend.resolve_dtype("auto", device)
    chosen = backend.choose("auto", device, dtype)
    facts = [
        ("device auto", f"{device} ({_why_no_gpu()})" if device.type == "cpu" else str(device)),
        ("dtype auto", str(dtype).removeprefix("torch.")),
        ("kernels auto", f"{chosen} (C++ built for this CPU, for float32)" if chosen == "cpp" else chosen),
    ]
    if device.type == "cpu" and chosen != "cpp":
        facts.append(("  not cpp", str(native.missing())))
    if device.type == "cuda" and chosen == "triton":
        facts.append(("  not CUDA C++ for few rows", str(backend.without_few_rows(device, dtype))))
    if chosen not in ("triton", backend.FASTEST):
        facts.append(("  not triton", str(backend.unavailable("triton", device))))
    reason = backend.unavailable("cuda", device)
    facts.append(
        (
            "kernels cuda",
            f"refused: {reason}"
            if reason
            else "few rows' operations, RMSNorm and prompt attention in CUDA C++, the rest Triton's",
        )
    )
    if device.type == "cpu":
        facts.append(("cuda_graphs", "off: there is no GPU"))
    return facts
