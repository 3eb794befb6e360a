"""A record as a Markdown table: what the README shows is what this prints."""

from __future__ import annotations

from labkit.bench.machine import Machine
from labkit.bench.record import Memory, Record, StepCost, Summary

NOT_MEASURED = "–"


def markdown(record: Record, path: str) -> str:
    """The medians, our engine against each peer, and under them the machine and what a step and the memory cost."""
    peers = list(dict.fromkeys(row.engine for row in record.summary if row.engine != "labkit"))
    peers += [name for name in record.peers if name not in peers]
    head = [f"{record.model}, tok/s", "labkit", *peers, *(f"× {peer}" for peer in peers)]
    lines = [_row(head), _row(["---"] + ["---:"] * (len(head) - 1))]
    by_place = {(row.workload, row.engine): row for row in record.summary}
    ratios = {(row.workload, row.peer): row.ratio for row in record.comparisons}
    for workload in record.workloads:
        rates = [_rate(by_place.get((workload.name, engine))) for engine in ("labkit", *peers)]
        times = [_ratio(ratios.get((workload.name, peer))) for peer in peers]
        lines.append(_row([f"{workload.name} ({workload.counts})", *rates, *times]))
    together = ", all engines in one process in turn" if peers else ""
    notes = [f"Median of {_repeats(record)}, {record.dtype}{together}. {_machine(record)}"]
    notes += [f"{name}: {how}." for name, how in record.peers.items() if how.startswith("not measured")]
    notes += [_streams(by_place), _step_cost(record.step_cost), _memory(record.memory)]
    notes.append(f"Raw: `{path}`.")
    return "\n".join([*lines, "", *(note for note in notes if note)])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rate(row: Summary | None) -> str:
    return NOT_MEASURED if row is None else f"{row.tok_s:,.0f}" if row.tok_s >= 100 else f"{row.tok_s:.1f}"


def _ratio(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else f"{ratio:.2f}"


def _repeats(record: Record) -> str:
    counts = {row.repeats for row in record.summary}  # the same for all in one session
    return f"{_count(min(counts), 'run')} of each"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _machine(record: Record) -> str:
    machine: Machine = record.machine
    chip = (
        machine.gpus[0].name
        if machine.gpus and record.device.startswith("cuda")
        else (f"{machine.cpu}, {_count(machine.threads, 'thread')}")
    )
    commit = f"commit {machine.commit[:7]}" if machine.commit else "no commit known"
    changed = " with changes" if machine.tree_clean is False else ""
    return f"{chip}, torch {machine.packages.get('torch')}, {record.date[:10]}, {commit}{changed}."


def _streams(by_place: dict[tuple[str, str], Summary]) -> str:
    one, eight = by_place.get(("decode1", "labkit")), by_place.get(("decode8", "labkit"))
    return f"Eight streams give {eight.tok_s / one.tok_s:.1f} times the tokens of one." if one and eight else ""


def _step_cost(cost: StepCost | None) -> str:
    if cost is None:
        return ""
    return (
        f"A step at {cost.streams} streams takes {cost.step_ms:.1f} ms: {cost.model_ms:.1f} in the model, "
        f"{cost.own_ms:.2f} around it ({cost.runner_ms:.2f} buffers and sampling, {cost.scheduler_ms:.2f} scheduler, "
        f"{cost.caller_ms:.2f} outputs)."
    )


def _memory(memory: Memory | None) -> str:
    if memory is None:
        return ""
    mib = 1 << 20
    added, peak = (b - memory.before_bytes for b in (memory.after_load_bytes, memory.peak_load_bytes))
    return (
        f"Loading adds {added / mib:,.0f} MiB of resident memory (at its peak {peak / mib:,.0f}); "
        f"weights are {memory.weights_bytes / mib:,.0f} MiB, the KV cache {memory.kv_bytes / mib:,.0f}."
    )
