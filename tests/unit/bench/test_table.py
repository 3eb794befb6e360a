from __future__ import annotations

import math

import msgspec

from labkit.bench.table import of_kernels, of_offline, of_profile
from tests.unit.bench.samples import GPU_MACHINE, a_kernel_record, a_profile, a_record


def test_the_table() -> None:
    assert of_offline(a_record(), "data/recorded/cpu-offline-2026-11-30.json").splitlines() == [
        "| tiny, tok/s | labkit | transformers | llama.cpp | × transformers | × llama.cpp |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| decode1 (output) | 31.0 | 9.0 | – | 3.44 | – |",
        "| decode8 (output) | 122 | 61.0 | – | 2.00 | – |",
        "",
        "Median of 3 runs of each, float32, all engines in one session, in turn. Test CPU, 2 threads, torch 2.9.0, "
        "2026-11-30, commit 0123456.",
        "transformers: 5.0, generate().",
        "llama.cpp: not measured: no module named llama_cpp.",
        "Eight streams give 3.9 times the tokens of one.",
        "A step at 8 streams takes 65.0 ms: 64.0 in the model, 1.00 around it (0.50 buffers and sampling, "
        "0.38 scheduler, 0.12 outputs).",
        "Loading adds 540 MiB of resident memory (at its peak 600); weights are 500 MiB, the KV cache 20.",
        "Raw: `data/recorded/cpu-offline-2026-11-30.json`.",
    ]


def test_a_changed_tree_is_told() -> None:
    record = a_record()
    dirty = msgspec.structs.replace(record, machine=msgspec.structs.replace(record.machine, tree_clean=False))
    assert "commit 0123456 with changes." in of_offline(dirty, "x.json")


def test_without_peers_there_are_no_columns_for_them() -> None:
    record = a_record()
    rows = [row for row in record.summary if row.engine == "labkit"]
    alone = msgspec.structs.replace(record, summary=rows, peers={}, comparisons=[], step_cost=None, memory=None)
    assert of_offline(alone, "x.json").splitlines()[:3] == [
        "| tiny, tok/s | labkit |",
        "| --- | ---: |",
        "| decode1 (output) | 31.0 |",
    ]


def test_on_a_gpu_it_is_the_gpus_memory_that_counts() -> None:
    record = msgspec.structs.replace(a_record(), device="cuda:0", machine=GPU_MACHINE, model="/somewhere/tiny")
    lines = of_offline(record, "x.json").splitlines()
    assert lines[0].startswith("| tiny, tok/s |"), "a model's name, not where it lay"
    assert "On the GPU, weights are 500 MiB, the KV cache 20." in lines
    assert any("NVIDIA H200, torch 2.9.0, 2026-11-30" in line for line in lines)


def test_the_kernels() -> None:
    assert of_kernels(a_kernel_record(), "k.json").splitlines() == [
        "| operation | shape | dtype | µs | rate | of copy | beside it | µs | × faster |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| rms_norm | 8192 × 4096 | bfloat16 | 34.0 | 3,948 GB/s | 92% | PyTorch's definition | 238 | 7.00 |",
        "| prefill attention | 8 × 2048 | bfloat16 | 300 | 459 TFLOP/s | – | SDPA, cuDNN | 270 | 0.90 |",
        "",
        "Medians. A copy of 4 GiB, read and written, goes at 4,300 GB/s, the best of: copy_ 2,780, Triton 4,300. "
        "NVIDIA H200, torch 2.9.0, 2026-11-30, commit 0123456.",
        "Raw: `k.json`.",
    ]


def test_a_kernel_with_nothing_beside_it() -> None:
    record = a_kernel_record()
    alone = msgspec.structs.replace(record.rows[1], reference_us=math.nan, reference="SDPA, none")
    text = of_kernels(msgspec.structs.replace(record, rows=[alone]), "k.json")
    assert "| SDPA, none | – | – |" in text


def test_a_profile() -> None:
    assert of_profile(a_profile(), "p.json").splitlines() == [
        "| kernel | launches a step | µs a step | of the step |",
        "| --- | ---: | ---: | ---: |",
        "| `gemv` | 112 | 400 | 50% |",
        f"| `{'void cutlass' + 59 * '<'}…` | 28 | 200 | 25% |",
        "| 2 others | 3 | 12.0 | 2% |",
        "| no kernel runs |  | 190 | 24% |",
        "",
        "A decode step of b1 with tiny in bfloat16, 1 sequence, on average over 16: 780 µs without the profiler, "
        "800 with it, 610 of them with a kernel running. NVIDIA H200, torch 2.9.0, 2026-11-30, commit 0123456.",
        "Raw: `p.json`.",
    ]
