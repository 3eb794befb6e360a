"""`labkit bench profile`: where one decode step goes on a GPU: the kernels, summed by name, and the gaps between them.

The profiler slows a step a little, and kernels may overlap, so there are three times of a step: without the profiler,
as the caller waits for it; with the profiler, on the GPU; and of that the part in which any kernel ran.
"""

from __future__ import annotations

import collections
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.profiler import ProfilerActivity

from labkit.bench.machine import Machine, describe_machine
from labkit.bench.offline import fitted, plain
from labkit.bench.ours import Labkit
from labkit.bench.workloads import Workload, make_workload
from labkit.config import EngineConfig, SamplingParams
from labkit.engine.core import EngineCore
from labkit.engine.request import EngineRequest
from labkit.errors import LabkitError
from labkit.kernels import backend
from labkit.models.checkpoint import open_checkpoint

SCHEMA = 1
STEPS = 16
TOKENS_BEFORE = 4  # that every request has by then: all prompts are computed, and the step's graph is recorded


class KernelTime(msgspec.Struct, frozen=True):
    """All launches of one kernel, or copies of one kind, in one step on average."""

    name: str
    launches: float
    us: float


class ProfileRecord(msgspec.Struct, frozen=True):
    """One session of `labkit bench profile`. Times are of one step, in microseconds, on average over `steps` steps."""

    schema: int
    kind: str
    date: str  # ISO 8601, UTC
    command: list[str]
    machine: Machine
    model: str
    dtype: str
    device: str
    engine_options: dict[str, Any]
    workload: str
    streams: int
    steps: int
    step_us: float  # without the profiler
    profiled_us: float  # on the GPU, from one step's first kernel to the next one's
    busy_us: float  # of profiled_us, with any kernel running; the rest is gaps
    kernels: list[KernelTime]  # those that take longest first


class Span(NamedTuple):
    """One kernel or copy on the GPU; microseconds."""

    name: str
    start: float
    end: float


def measure(model: str, workload_name: str, config: EngineConfig, command: Sequence[str]) -> ProfileRecord:
    """Profile the decode step of a workload when all its requests run.

    Raises:
        LabkitError: the device is no GPU, or the workload does not decode.
    """
    device = backend.resolve_device(config.device)
    if device.type != "cuda":
        raise LabkitError(f"labkit bench profile looks at a CUDA GPU, and the device is {device}")
    machine = describe_machine()
    checkpoint = open_checkpoint(model)
    workload = make_workload(workload_name, checkpoint.config.vocab_size)
    if workload.counts != "output":
        raise LabkitError(f"{workload_name} has no decode steps; take one that counts output tokens")
    config = fitted(config, [workload], checkpoint.config.max_position_embeddings, device)
    ours = Labkit(model, config, None)
    try:
        fill(ours.llm.engine, workload)
        step_us = timed_steps(ours.llm.engine, device)
        spans = profiled_steps(ours.llm.engine, device)
    finally:
        ours.close()
    profiled_us, busy_us, kernels = summarise(spans, STEPS)
    return ProfileRecord(
        schema=SCHEMA,
        kind="profile",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=list(command),
        machine=machine,
        model=Path(checkpoint.name).name,
        dtype=ours.dtype,
        device=str(device),
        engine_options={key: plain(value) for key, value in vars(ours.config).items()},
        workload=workload_name,
        streams=len(workload.prompts),
        steps=STEPS,
        step_us=step_us,
        profiled_us=profiled_us,
        busy_us=busy_us,
        kernels=kernels,
    )


def fill(engine: EngineCore, workload: Workload) -> None:
    """Bring all requests into the engine, and step until each has its first tokens.

    Raises:
        LabkitError: some have finished by then, or will before the steps are measured.
    """
    for number, (prompt, count) in enumerate(zip(workload.prompts, workload.max_tokens)):
        params = SamplingParams(temperature=workload.temperature, max_tokens=count, ignore_eos=True, detokenize=False)
        engine.add_request(EngineRequest(str(number), prompt, params))
    received = [0] * len(workload.prompts)
    while min(received) < TOKENS_BEFORE and engine.has_work():
        for delta in engine.step().deltas:
            received[int(delta.request_id)] += len(delta.token_ids)
    left = min(count - got for count, got in zip(workload.max_tokens, received))
    if min(received) < TOKENS_BEFORE or left < 2 * STEPS + TOKENS_BEFORE:
        raise LabkitError(f"{workload.name} never has all of its requests decoding for {2 * STEPS} steps")


def timed_steps(engine: EngineCore, device: torch.device) -> float:
    """Microseconds of one step."""
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / STEPS * 1e6


def profiled_steps(engine: EngineCore, device: torch.device) -> list[Span]:
    """What runs on the GPU during as many steps, those in graphs too. None is in flight at the beginning or the end."""
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize(device)
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"  # not the launches, which are the host's
    ]


def summarise(spans: list[Span], steps: int) -> tuple[float, float, list[KernelTime]]:
    """(time from first to last, time in which any ran, the kernels by name), each for one step.

    Raises:
        LabkitError: the profiler saw nothing.
    """
    if not spans:
        raise LabkitError("torch.profiler saw no kernel; another profiler may be holding the GPU's counters")
    busy, until = 0.0, min(span.start for span in spans)
    begin = until
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
        by_name[span.name].append(span.end - span.start)
    kernels = [KernelTime(name, len(times) / steps, sum(times) / steps) for name, times in by_name.items()]
    return (until - begin) / steps, busy / steps, sorted(kernels, key=lambda kernel: -kernel.us)
