"""A small record of each kind and a small trace, made by hand."""

from __future__ import annotations

from typing import Any

import msgspec

from labkit.bench.kernels import KernelRecord, KernelRow
from labkit.bench.machine import Gpu, Machine
from labkit.bench.profile import KernelTime, ProfileRecord
from labkit.bench.record import (
    SCHEMA,
    Memory,
    Record,
    RequestTimes,
    Run,
    StepCost,
    WorkloadRecord,
    compare,
    summarise,
)

MIB = 1 << 20
MACHINE = Machine(
    cpu="Test CPU",
    cores=2,
    threads=2,
    ram_bytes=8 << 30,
    os="Linux",
    python="3.12.0",
    packages={"torch": "2.9.0", "triton": None},
    cuda=None,
    gpus=[],
    commit="0123456789abcdef",
    tree_clean=True,
    load_average=[0.1, 0.2, 0.3],
)
GPU_MACHINE = msgspec.structs.replace(MACHINE, gpus=[Gpu("NVIDIA H200", 150 << 30, "9.0")])


def a_run(engine: str, order: int, tok_s: float, first: float | None = 0.1) -> Run:
    return Run(engine, order, 256 / tok_s, tok_s, [RequestTimes(48, 128, 0.0, first, 4.0)] * 2)


def a_record() -> Record:
    """Ours and transformers over one stream and eight; llama.cpp is not installed."""
    ours = {"decode1": (30.0, 32.0, 31.0), "decode8": (120.0, 124.0, 122.0)}
    theirs = {"decode1": (10.0, 8.0, 9.0), "decode8": (61.0, 61.0, 61.0)}
    workloads, rows = [], []
    for name in ours:
        runs = [a_run("labkit", i, rate) for i, rate in enumerate(ours[name])]
        runs += [a_run("transformers", 3 + i, rate) for i, rate in enumerate(theirs[name])]
        workloads.append(WorkloadRecord(name, 1, "output", 0.0, [48, 48], [128, 128], runs))
        rows += summarise(workloads[-1], {"labkit": "float32", "transformers": "float32"}, {"transformers": 1.0})
    return Record(
        schema=SCHEMA,
        kind="offline",
        date="2026-11-30T12:00:00+00:00",
        command=["labkit", "bench", "offline"],
        machine=MACHINE,
        model="tiny",
        parameters=1000,
        dtype="float32",
        device="cpu",
        engine_options={"block_size": 16, "num_kv_blocks": None},
        peers={"transformers": "5.0, generate()", "llama.cpp": "not measured: no module named llama_cpp"},
        workloads=workloads,
        summary=rows,
        comparisons=compare("tiny", rows),
        step_cost=StepCost(8, 128, 65.0, 64.0, 0.5, 0.375, 0.125),
        memory=Memory(500 * MIB, 20 * MIB, 300 * MIB, 840 * MIB, 900 * MIB, 880 * MIB),
    )


def a_kernel_record() -> KernelRecord:
    """One operation that memory bounds and one that arithmetic does."""
    beside = "PyTorch's definition"
    rows = [
        KernelRow("rms_norm", "8192 x 4096", "bfloat16", 1 << 27, 34.0, 238.0, beside, 3947.6, 0.918),
        KernelRow(
            "prefill attention",
            "8 x 2048",
            "bfloat16",
            1 << 27,
            300.0,
            270.0,
            "SDPA, cuDNN",
            447.0,
            0.1,
            137_600_000_000,
        ),
    ]
    return KernelRecord(
        schema=1,
        kind="kernels",
        date="2026-11-30T12:00:00+00:00",
        command=["labkit", "bench", "kernels"],
        machine=GPU_MACHINE,
        device="cuda:0",
        copy_gb_s=4300.0,
        rows=rows,
        copies_gb_s={"copy_": 2780.0, "Triton": 4300.0},
    )


def a_profile() -> ProfileRecord:
    """A step of which a quarter is gaps."""
    kernels = [
        KernelTime("gemv", 112.0, 400.0),
        KernelTime("void cutlass" + "<" * 90, 28.0, 200.0),
        KernelTime("draw", 1.0, 7.0),
        KernelTime("Memcpy HtoD", 2.0, 5.0),
    ]
    return ProfileRecord(
        schema=1,
        kind="profile",
        date="2026-11-30T12:00:00+00:00",
        command=["labkit", "bench", "profile"],
        machine=GPU_MACHINE,
        model="tiny",
        dtype="bfloat16",
        device="cuda:0",
        engine_options={"block_size": 16},
        workload="b1",
        streams=1,
        steps=16,
        step_us=780.0,
        profiled_us=800.0,
        busy_us=610.0,
        kernels=kernels,
    )


def a_trace() -> list[dict[str, Any]]:
    """r0 runs at once and finishes; r1 waits, is preempted, comes back, and its client leaves."""

    def step(t: float, number: int, prefill: list[Any], decode: list[str], ms: float, free: int) -> dict[str, Any]:
        fields = {"prefill": prefill, "decode": decode, "ms": ms, "free_blocks": free}
        return {"t": t, "step": number, "ev": "step", **fields}

    return [
        {"t": 0.0, "step": 0, "ev": "submit", "req": "r0", "prompt": 20},
        {"t": 0.001, "step": 0, "ev": "submit", "req": "r1", "prompt": 5},
        {"t": 0.002, "step": 0, "ev": "admit", "req": "r0", "blocks": [0, 1], "cached": 0},
        {"t": 0.0115, "step": 0, "ev": "first_token", "req": "r0"},
        step(0.012, 0, [["r0", 0, 20]], [], 10.0, 6),
        {"t": 0.013, "step": 1, "ev": "admit", "req": "r1", "blocks": [2], "cached": 0},
        step(0.020, 1, [["r1", 0, 5]], ["r0"], 7.0, 5),
        {"t": 0.021, "step": 2, "ev": "preempt", "req": "r1"},
        {"t": 0.025, "step": 2, "ev": "finish", "req": "r0", "reason": "length"},
        step(0.025, 2, [], ["r0"], 4.0, 8),
        {"t": 0.026, "step": 3, "ev": "evict", "block": 3},
        {"t": 0.027, "step": 3, "ev": "admit", "req": "r1", "blocks": [2], "cached": 0},
        step(0.030, 3, [["r1", 0, 6]], [], 3.0, 7),
        {"t": 0.031, "step": 4, "ev": "cancel", "req": "r1"},
    ]
