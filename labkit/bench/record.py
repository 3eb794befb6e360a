"""What a measurement leaves behind: raw JSON, every repeat and every request in it, and a CSV of the medians."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import msgspec

from labkit.bench.machine import Machine

SCHEMA = 2  # 1 had "peer" and "peer_tok_s" in its comparisons
OURS = "labkit"


class RequestTimes(msgspec.Struct, frozen=True):
    """One request: tokens in, tokens received, and seconds since its run began (None: this engine does not tell)."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


class Run(msgspec.Struct, frozen=True):
    """One engine ran one workload once."""

    engine: str
    order: int  # place in the whole session, 0 first: shows who ran after whom
    seconds: float
    tok_s: float  # tokens that the workload counts, over seconds
    requests: list[RequestTimes]


class Summary(msgspec.Struct, frozen=True):
    """One engine on one workload: the median of its runs and the range they lie in."""

    workload: str
    engine: str
    dtype: str
    counts: str  # tok_s counts "output" or "prompt" tokens
    repeats: int
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    first_token_s: float | None  # median over requests and runs
    tokens_as_ours: float | None  # share of output tokens equal to ours up to the first that differs; None: sampled


class WorkloadRecord(msgspec.Struct, frozen=True):
    """A workload as it was run; its prompts follow from name, seed and vocabulary."""

    name: str
    seed: int
    counts: str
    temperature: float
    prompt_tokens: list[int]
    output_tokens: list[int]
    runs: list[Run]


class StepCost(msgspec.Struct, frozen=True):
    """Milliseconds of one decode step at `streams` streams, on average over `steps` steps.

    step_ms is what the caller of `generate` waits for; the other four are its parts:

        model_ms       the decoder's forward pass and its logits
        runner_ms      the rest of the runner: input buffers, drawing tokens
        scheduler_ms   schedule, book, report
        caller_ms      the LLM class around the engine: requests in, outputs together
    """

    streams: int
    steps: int
    step_ms: float
    model_ms: float
    runner_ms: float
    scheduler_ms: float
    caller_ms: float

    @property
    def own_ms(self) -> float:
        """All of a step that is not the model."""
        return self.runner_ms + self.scheduler_ms + self.caller_ms


class Memory(msgspec.Struct, frozen=True):
    """Resident bytes of this process around loading, beside what weights and KV cache must take."""

    weights_bytes: int
    kv_bytes: int
    before_bytes: int
    after_load_bytes: int
    peak_load_bytes: int  # highest so far when loading was done
    after_run_bytes: int  # after the first workload had been run once

    @property
    def load_over_weights(self) -> float:
        """What loading added, over the weights' size. About 1: they are kept once. (The KV pool is made of pages
        that take no memory until they are written.)"""
        return (self.after_load_bytes - self.before_bytes) / self.weights_bytes


class Record(msgspec.Struct, frozen=True):
    """One session of `labkit bench offline`."""

    schema: int
    kind: str
    date: str  # ISO 8601, UTC
    command: list[str]
    machine: Machine
    model: str
    parameters: int
    dtype: str  # as loaded
    device: str
    engine_options: dict[str, Any]  # resolved: what the engine ran with
    peers: dict[str, str]  # name -> version and how it ran, or "not measured: why"
    workloads: list[WorkloadRecord]
    summary: list[Summary]
    comparisons: list[dict[str, Any]]  # of `compare`: for whoever reads the file, as the summary says it all
    step_cost: StepCost | None
    memory: Memory | None


def summarise(workload: WorkloadRecord, dtypes: dict[str, str], agreement: dict[str, float]) -> list[Summary]:
    """One row for each engine, in the order in which they first ran."""
    rows = []
    for engine in dict.fromkeys(run.engine for run in workload.runs):
        runs = [run for run in workload.runs if run.engine == engine]
        rates = [run.tok_s for run in runs]
        firsts = [r.first_token_s for run in runs for r in run.requests if r.first_token_s is not None]
        rows.append(
            Summary(
                workload=workload.name,
                engine=engine,
                dtype=dtypes[engine],
                counts=workload.counts,
                repeats=len(runs),
                tok_s=statistics.median(rates),
                tok_s_min=min(rates),
                tok_s_max=max(rates),
                first_token_s=statistics.median(firsts) if firsts else None,
                tokens_as_ours=agreement.get(engine),
            )
        )
    return rows


def ratios(rows: list[Summary]) -> dict[tuple[str, str], float]:
    """(workload, peer) -> our median over the peer's, more than 1 if we are faster; only workloads that we ran."""
    mine = {row.workload: row.tok_s for row in rows if row.engine == OURS}
    return {
        (row.workload, row.engine): round(mine[row.workload] / row.tok_s, 3)
        for row in rows
        if row.engine != OURS and row.workload in mine
    }


def compare(model: str, rows: list[Summary]) -> list[dict[str, Any]]:
    """A row for each workload and peer: {"model", "workload", "tok_s", "vllm_tok_s", "ratio"}."""
    rates = {(row.workload, row.engine): row.tok_s for row in rows}
    return [
        {
            "model": model,
            "workload": workload,
            "tok_s": rates[workload, OURS],
            f"{peer}_tok_s": rates[workload, peer],
            "ratio": ratio,
        }
        for (workload, peer), ratio in ratios(rows).items()
    ]


def write_record(record: Record, path: Path) -> Path:
    """Write the JSON to `path` and the medians to a CSV beside it, whose path is returned."""
    write_json(record, path)
    table = path.with_suffix(".csv")
    names = [field.name for field in msgspec.structs.fields(Summary)]
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["model", *names, "labkit_over_this"], lineterminator="\n")
        writer.writeheader()
        over = ratios(record.summary)
        for row in record.summary:
            ratio = over.get((row.workload, row.engine))
            writer.writerow({"model": record.model, **msgspec.structs.asdict(row), "labkit_over_this": ratio})
    return table


def write_json(record: msgspec.Struct, path: Path) -> None:
    """Write a record for machines and for people to read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
