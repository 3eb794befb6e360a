"""`labkit bench kernels`: every operation of a step, beside PyTorch's definition of it and beside what memory allows.

Each row says how many bytes the operation has to move (every input read once, every output written once), how long it
took, and the share of a copy's bandwidth that this is: the fastest large copy on the device, measured in the same run.
Inputs are random and take turns, so that together they do not fit in the L2 cache.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Iterator

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from labkit.bench.copying import copy_bandwidths
from labkit.bench.machine import Machine, describe_machine
from labkit.errors import LabkitError
from labkit.kernels import activation, backend, cuda, draw, linear, rms_norm, sampling
from labkit.kernels.jit import triton

SCHEMA = 1
CACHE_BYTES = 256 << 20  # what the sets of inputs have together at least; an H200 has 60 MB of L2
MAX_SETS = 16
VOCAB = 151_936  # Qwen3's


class KernelRow(msgspec.Struct, frozen=True):
    """One operation at one shape. Times are medians, in microseconds."""

    op: str
    shape: str
    dtype: str
    bytes: int  # that have to be moved
    us: float
    reference_us: float  # PyTorch's definition, or what `reference` says
    reference: str
    gb_s: float
    of_copy: float  # gb_s over the copy's
    flops: int = 0


class KernelRecord(msgspec.Struct, frozen=True):
    """One session of `labkit bench kernels`."""

    schema: int
    kind: str
    date: str  # ISO 8601, UTC
    command: list[str]
    machine: Machine
    device: str
    copy_gb_s: float  # bytes read and bytes written; the fastest of `copies_gb_s`
    rows: list[KernelRow]
    copies_gb_s: dict[str, float]  # how -> GB/s


class Case(msgspec.Struct, frozen=True):
    """What to measure: both functions are called with one set of inputs in turn, none of which they may keep."""

    op: str
    shape: str
    dtype: torch.dtype
    bytes: int
    inputs: Callable[[], tuple[Tensor, ...]]
    ours: Callable[..., object]
    reference: Callable[..., object]
    reference_name: str = "PyTorch's definition"


def measure(device: torch.device, command: list[str], say: Callable[[str], None]) -> KernelRecord:
    """Measure all of it; `say` gets a line for each row.

    Raises:
        LabkitError: the device is no GPU, or there is no Triton.
    """
    from labkit.bench.attention_kernels import attention_rows  # which imports this module

    device = _gpu(device)
    torch.manual_seed(0)
    machine = describe_machine()
    with torch.inference_mode(), torch.cuda.device(device):
        copies = copy_bandwidths(device)
        copied = max(copies.values())
        for name, rate in copies.items():
            say(f"copy, {name}: {rate / 1e9:.0f} GB/s")
        rows = []
        missing = backend.unavailable("cuda", device)
        if missing is not None:
            say(f"CUDA C++ kernels are not measured: {missing}")
        norms = cuda_cases(device) if missing is None else ()
        for case in itertools.chain(pointwise_cases(device), norms, linear_cases(device), sampling_cases(device)):
            rows.append(_run(case, copied))
            say(line(rows[-1]))
        for row in attention_rows(device, copied, in_cuda=missing is None):
            rows.append(row)
            say(line(row))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    in_gb = {name: rate / 1e9 for name, rate in copies.items()}
    return KernelRecord(SCHEMA, "kernels", now, command, machine, str(device), copied / 1e9, rows, in_gb)


def _gpu(device: torch.device) -> torch.device:
    """The device, if these kernels can run there."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise LabkitError("labkit bench kernels measures a CUDA GPU, and PyTorch finds none here")
    reason = backend.unavailable("triton", device)
    if reason is not None:
        raise LabkitError(f"labkit bench kernels measures Triton kernels, and there are none here: {reason}")
    return backend.resolve_device(str(device))


def line(row: KernelRow) -> str:
    """One row for people."""
    return (
        f"{row.op:28} {row.shape:26} {row.dtype:9} {row.us:9.1f} us {row.gb_s:6.0f} GB/s {row.of_copy:5.0%} of copy"
        f" {row.reference_us:10.1f} us {row.reference}"
    )


def median_us(function: Callable[[], object]) -> float:
    """Median time of one call, replayed from a CUDA graph: what the device needs, not what Python does."""
    return float(triton.testing.do_bench_cudagraph(function, rep=20, return_mode="median")) * 1e3


def in_turn(function: Callable[..., object], sets: list[tuple[Tensor, ...]]) -> float:
    """Median microseconds of a call over all sets of inputs, one after the other."""

    def all_sets() -> None:
        for inputs in sets:
            function(*inputs)

    return median_us(all_sets) / len(sets)


def _run(case: Case, copied: float) -> KernelRow:
    first = case.inputs()
    size = sum(x.nbytes for x in first)
    count = max(1, min(MAX_SETS, math.ceil(CACHE_BYTES / size)))
    sets = [first, *(case.inputs() for _ in range(count - 1))]
    us = in_turn(case.ours, sets)
    reference_us = in_turn(case.reference, sets)
    rate = case.bytes / (us * 1e-6)
    dtype = str(case.dtype).removeprefix("torch.")
    return KernelRow(
        case.op, case.shape, dtype, case.bytes, us, reference_us, case.reference_name, rate / 1e9, rate / copied
    )


# --------------------------------------------------------------------------- cases


def pointwise_cases(device: torch.device) -> Iterator[Case]:
    """Norms and the MLP's gate, for a prompt and for few rows."""
    dtype = torch.bfloat16

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    for rows, width in ((8192, 4096), (8192, 1024), (256, 1024), (8, 1024), (1, 1024)):
        shape, size = f"{rows} x {width}", rows * width * dtype.itemsize
        weight = normal(width)
        yield Case(
            "rms_norm",
            shape,
            dtype,
            2 * size,
            lambda r=rows, w=width: (normal(r, w),),  # type: ignore[misc]
            lambda x, w=weight: rms_norm.rms_norm_triton(x, w, 1e-6),
            lambda x, w=weight: rms_norm.rms_norm(x, w, 1e-6),
        )
        yield Case(
            "add_rms_norm",
            shape,
            dtype,
            4 * size,
            lambda r=rows, w=width: (normal(r, w), normal(r, w)),  # type: ignore[misc]
            lambda x, y, w=weight: rms_norm.add_rms_norm_triton(x, y, w, 1e-6),
            lambda x, y, w=weight: rms_norm.add_rms_norm(x, y, w, 1e-6),
        )
        yield Case(
            "silu_mul",
            shape,
            dtype,
            3 * size,
            lambda r=rows, w=width: (normal(r, 2 * w),),  # type: ignore[misc]
            activation.silu_mul_triton,
            lambda x: functional.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
        )


def cuda_cases(device: torch.device) -> Iterator[Case]:
    """The norms of csrc/rms_norm.cu, at a prompt's largest shape."""
    dtype, rows, width = torch.bfloat16, 8192, 4096

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    shape, size, weight = f"{rows} x {width}", rows * width * dtype.itemsize, normal(width)
    yield Case(
        "rms_norm, CUDA C++",
        shape,
        dtype,
        2 * size,
        lambda: (normal(rows, width),),
        lambda x: cuda.rms_norm(x, weight, 1e-6),
        lambda x: rms_norm.rms_norm(x, weight, 1e-6),
    )
    yield Case(
        "add_rms_norm, CUDA C++",
        shape,
        dtype,
        4 * size,
        lambda: (normal(rows, width), normal(rows, width)),
        lambda x, y: cuda.add_rms_norm(x, y, weight, 1e-6),
        lambda x, y: rms_norm.add_rms_norm(x, y, weight, 1e-6),
    )


def linear_cases(device: torch.device) -> Iterator[Case]:
    """The kernels for few rows beside cuBLAS, at the layers of Qwen3-0.6B and Llama-3.2-1B: where are they faster?"""
    dtype = torch.bfloat16
    layers = {
        "qwen3 qkv": (4096, 1024),
        "qwen3 out": (1024, 2048),
        "qwen3 gate_up": (6144, 1024),
        "qwen3 down": (1024, 3072),
        "qwen3 lm_head": (VOCAB, 1024),
        "llama qkv": (3072, 2048),
        "llama gate_up": (16384, 2048),
        "llama down": (2048, 8192),
        "llama lm_head": (128256, 2048),
    }
    in_cuda = backend.without_few_rows(device) is None
    for (name, (outputs, width)), rows in itertools.product(layers.items(), (1, 2, 4, 8)):
        few_rows = cuda.few_rows if in_cuda else linear.few_rows

        def inputs(outputs: int = outputs, width: int = width, rows: int = rows) -> tuple[Tensor, ...]:
            weight = torch.randn(outputs, width, device=device, dtype=torch.float32).to(dtype)
            return torch.randn(rows, width, device=device, dtype=torch.float32).to(dtype), weight

        size = (outputs * width + rows * (width + outputs)) * dtype.itemsize
        yield Case(
            f"linear {name}{', CUDA C++' if in_cuda and rows > 2 else ''}",
            f"{rows} rows",
            dtype,
            size,
            inputs,
            linear.gemv if rows <= 2 else few_rows,
            functional.linear,
            "cuBLAS",
        )


def sampling_cases(device: torch.device) -> Iterator[Case]:
    """256 rows of Qwen3's vocabulary and one: greedy, drawn, and filtered. Bytes: the logits, once."""
    settings = {  # temperature, top_p, top_k
        "greedy": (0.0, 1.0, 0),
        "sample": (0.6, 1.0, 0),
        "sample top_k 50": (0.6, 1.0, 50),
        "sample top_p .9 top_k 50": (0.6, 0.9, 50),
        "sample top_p .9": (0.6, 0.9, 0),
    }
    for rows, dtype in ((256, torch.float32), (256, torch.bfloat16), (1, torch.float32)):
        for name, (temperature, top_p, top_k) in settings.items():
            yield _sampling_case(name, rows, dtype, temperature, top_p, top_k, device)


def _sampling_case(
    name: str, rows: int, dtype: torch.dtype, temperature: float, top_p: float, top_k: int, device: torch.device
) -> Case:
    """All rows alike but for their seeds."""
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    table = torch.zeros(rows, 10, dtype=torch.int32, device=device)
    floats = table[:, :6].view(torch.float32)
    floats[:, 0], floats[:, 1], floats[:, 3] = temperature, top_p, 1.0
    table[:, 6], table[:, 8] = top_k, slots * 7919

    def inputs() -> tuple[Tensor, ...]:
        return (3 * torch.randn(rows, VOCAB, device=device, dtype=torch.float32).to(dtype),)

    def ours(logits: Tensor) -> object:
        return draw.draw(logits, table, slots, slots, filtered=top_p < 1 or top_k > 0)

    def reference(logits: Tensor) -> object:
        if temperature == 0:
            return sampling.greedy(logits)
        return sampling.sample(
            logits.float(),
            floats[:, 0],
            sampling.noise_keys(table[:, 8:], table[:, 7], slots),
            top_k=table[:, 6] if top_k > 0 else None,
            top_p=floats[:, 1] if top_p < 1 else None,
        )

    return Case(name, f"{rows} x {VOCAB}", dtype, rows * VOCAB * dtype.itemsize, inputs, ours, reference)
