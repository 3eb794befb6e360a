"""Devices, number formats and kernel backends: what this machine can run, and what is picked.

An operation has up to four versions: ``torch`` (the reference that defines it, on any device), ``triton``, ``cuda``
(CUDA C++: what few rows need, RMSNorm and the attention of prompts; the others are Triton's then) and ``cpp``, what
"auto" means for float32 on a CPU with a C++ compiler. On a GPU "auto" is Triton with what CUDA C++ has for few rows.

The function that everybody calls picks: it asks `on_cpp`, `on_cuda` and `on_triton`, hands over to the first that says
yes, and is itself the ``torch`` version. So a lesson that replaces the function replaces all of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from labkit.errors import KernelError, ModelError
from labkit.kernels import cuda, native
from labkit.kernels.jit import interpreted, triton

BACKENDS = ("torch", "triton", "cuda")
FASTEST = "triton + cuda"  # Triton, with what few rows need in CUDA C++: cannot be forced
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BFLOAT16_SINCE = (8, 0)  # compute capability (Ampere); older GPUs only emulate it, slowly
TRITON_SINCE = (7, 5)  # compute capability (Turing)
MAX_HEAD_DIM = 256  # what attention keeps in registers and shared memory

# The version that operations use now, and whether a row's result may depend on its neighbours: the one global choice,
# made by the decoder for each pass.
current = "torch"
invariant = False


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of a device without running anything on it."""

    device: torch.device
    name: str
    capability: tuple[int, int] | None  # compute capability of a GPU
    default_dtype: torch.dtype
    memory_bytes: int | None  # of a GPU
    threads: int | None  # of a CPU: how many PyTorch uses


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` means here.

    Raises:
        ModelError: a GPU is asked for that is not there.
    """
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ModelError(f"device is {name!r}, but PyTorch finds no CUDA GPU here; use device='cpu' or 'auto'")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ModelError(f"device is {name!r}, but the GPUs here are cuda:0 to cuda:{last}")
    return torch.device("cuda", index)


def facts(device: torch.device) -> DeviceFacts:
    """Name, capability, memory and the default number format of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        dtype = torch.bfloat16 if capability >= BFLOAT16_SINCE else torch.float16
        return DeviceFacts(device, properties.name, capability, dtype, properties.total_memory, None)
    return DeviceFacts(device, cpu_name() or "CPU", None, torch.float32, None, torch.get_num_threads())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format that weights, keys and values have on this device.

    Raises:
        ModelError: bfloat16 is asked for on a GPU that has no arithmetic for it.
    """
    known = facts(device)
    if name == "auto":
        return known.default_dtype
    dtype = DTYPES[name]
    if dtype == torch.bfloat16 and known.capability is not None and known.capability < BFLOAT16_SINCE:
        major, minor = known.capability
        raise ModelError(
            f"dtype is 'bfloat16', but {known.name} has compute capability {major}.{minor} and bfloat16 needs 8.0; "
            "use dtype='float16' or 'auto'"
        )
    return dtype


def unavailable(
    backend: str, device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> str | None:
    """Why a backend cannot run on this device, with these weights if they are known; None if it can."""
    if backend == "torch":
        return None
    if backend == "cuda":
        if device.type != "cuda":
            return f"it needs a CUDA GPU, and the device is {device.type}"
        without = unavailable("triton", device, dtype, head_dim)
        if without is not None:
            return f"most of its operations are Triton's, and {without}"
        known = facts(device)
        assert known.capability is not None
        return cuda.unavailable(known.capability, known.name, dtype, head_dim)
    if triton is None:
        return "Triton is not installed (there is none for macOS and Windows)"
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        return f"its attention takes heads of {MAX_HEAD_DIM} numbers at most, and these have {head_dim}"
    if device.type == "cuda":
        known = facts(device)
        if known.capability is not None and known.capability < TRITON_SINCE:
            major, minor = known.capability
            return f"it needs compute capability 7.5, and {known.name} has {major}.{minor}"
        return None
    if device.type != "cpu" or not interpreted():
        return f"it needs a CUDA GPU, and the device is {device.type} (tests of small shapes: TRITON_INTERPRET=1)"
    if dtype == torch.bfloat16:
        return "its interpreter computes bfloat16 wrongly; use float32 or float16"
    return None


def choose(kernels: str, device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None) -> str:
    """The backend that `kernels` of the configuration means on this device.

    `auto` is triton on a GPU that it can run on, with CUDA C++'s operations for few rows if they can be built; on a CPU
    cpp for float32 if it can be built; otherwise torch.

    Raises:
        KernelError: a backend is forced that cannot run here, with the reason.
    """
    if kernels == "auto":
        if device.type == "cpu" and dtype == torch.float32 and native.missing() is None:
            return "cpp"
        on_gpu = device.type == "cuda" and unavailable("triton", device, dtype, head_dim) is None
        if not on_gpu:
            return "torch"
        return "triton" if without_few_rows(device, dtype) else FASTEST
    if kernels not in BACKENDS:
        raise KernelError(f"kernels is {kernels!r}; it can be auto, {', '.join(BACKENDS)}")
    reason = unavailable(kernels, device, dtype, head_dim)
    if reason is not None:
        raise KernelError(f"kernels is {kernels!r}, but {reason}; use kernels='torch' or 'auto'")
    return kernels


def without_few_rows(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why the operations for few rows in CUDA C++ cannot run on a GPU; None if they can."""
    known = facts(device)
    assert known.capability is not None
    if dtype == torch.float32:
        return "they take float16 and bfloat16"
    return cuda.unavailable(known.capability, known.name)


def check_invariant(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Whether results can be made independent of the batch, with the version that `choose` gave.

    Raises:
        KernelError: they cannot, with the reason.
    """
    if name not in ("triton", FASTEST) and (device.type != "cpu" or dtype != torch.float32):
        kind = str(dtype).removeprefix("torch.")
        raise KernelError(
            f"batch_invariant is true, but with kernels {name!r} and {kind} on {device.type} the matrix products are a "
            "library's, which rounds differently for other batches; use Triton's kernels on a GPU, or float32 on a CPU"
        )


def use(name: str, batch_invariant: bool = False) -> None:
    """Make the operations use this version, of `choose`, from now on."""
    global current, invariant
    current, invariant = name, batch_invariant


def on_cpp(*tensors: torch.Tensor) -> bool:
    """Whether an operation on these goes to C++."""
    return current == "cpp" and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


def on_cuda() -> bool:
    """Whether an operation that has a version in CUDA C++ goes there."""
    return current == "cuda"


def on_triton() -> bool:
    """Whether an operation goes to Triton; with "cuda" those do that have no version in CUDA C++."""
    return current in ("triton", "cuda", FASTEST)


def few_rows_on_cuda() -> bool:
    """Whether operations on few rows go to CUDA C++. What may not depend on the number of rows does not."""
    return current in ("cuda", FASTEST) and not invariant


def has_tensor_cores(device: torch.device) -> bool:
    """Whether Triton's tl.dot runs on tensor cores. On Turing (7.5) it does not, and kernels without it are faster."""
    capability = facts(device).capability
    return capability is None or capability >= BFLOAT16_SINCE


def cpu_name() -> str:
    """The processor's name as the system tells it; empty where it does not."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return ""
