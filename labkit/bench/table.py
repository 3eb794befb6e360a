"""Records as Markdown tables: what README.md and docs/measured.md show is what these print."""

from __future__ import annotations

import math
from pathlib import PurePosixPath

from labkit.bench.kernels import KernelRecord, KernelRow
from labkit.bench.load.record import ServeRecord, SoakRecord
from labkit.bench.profile import ProfileRecord
from labkit.bench.record import OURS, Memory, Record, StepCost, Summary, ratios

NOT_MEASURED = "–"
SHOWN = 0.01  # of a step; kernels that take less are summed up
NAME_LENGTH = 72  # of a kernel; names of templates fill a page

AnyRecord = Record | KernelRecord | ProfileRecord | ServeRecord | SoakRecord


def of_offline(record: Record, path: str) -> str:
    """The medians, our engine against each peer, and under them the machine and what a step and the memory cost."""
    peers = list(dict.fromkeys(row.engine for row in record.summary if row.engine != OURS))
    peers += [name for name in record.peers if name not in peers]
    # Records of schema 1 may name a model by its path.
    head = [f"{PurePosixPath(record.model).name}, tok/s", OURS, *peers, *(f"× {peer}" for peer in peers)]
    lines = table_head(head, 1)
    by_place = {(row.workload, row.engine): row for row in record.summary}
    over = ratios(record.summary)
    for workload in record.workloads:
        rates = [_rate(by_place.get((workload.name, engine))) for engine in (OURS, *peers)]
        times = [_ratio(over.get((workload.name, peer))) for peer in peers]
        lines.append(table_row([f"{workload.name} ({workload.counts})", *rates, *times]))
    together = ", all engines in one session, in turn" if peers else ""
    notes = [f"Median of {_repeats(record)}, {record.dtype}{together}. {machine_line(record)}"]
    notes += [f"{name}: {how}." for name, how in record.peers.items()]
    notes += [_streams(by_place), _step_cost(record.step_cost), _memory(record)]
    notes.append(f"Raw: `{path}`.")
    return "\n".join([*lines, "", *(note for note in notes if note)])


def of_kernels(record: KernelRecord, path: str) -> str:
    """Every operation beside what it is compared with; arithmetic instead of bytes where that is the limit."""
    lines = table_head(["operation", "shape", "dtype", "µs", "rate", "of copy", "beside it", "µs", "× faster"], 3)
    for row in record.rows:
        lines.append(
            table_row(
                [
                    row.op,
                    row.shape.replace(" x ", " × "),
                    row.dtype,
                    _us(row.us),
                    _kernel_rate(row),
                    NOT_MEASURED if row.flops else f"{row.of_copy:.0%}",
                    row.reference,
                    _us(row.reference_us),
                    NOT_MEASURED if math.isnan(row.reference_us) else f"{row.reference_us / row.us:.2f}",
                ]
            )
        )
    copies = ", ".join(f"{name} {rate:,.0f}" for name, rate in record.copies_gb_s.items())
    notes = [
        f"Medians. A copy of 4 GiB, read and written, goes at {record.copy_gb_s:,.0f} GB/s, the best of: {copies}. "
        f"{machine_line(record)}",
        f"Raw: `{path}`.",
    ]
    return "\n".join([*lines, "", *notes])


def of_profile(record: ProfileRecord, path: str) -> str:
    """The kernels of a step that take longest, and what no kernel takes."""
    lines = table_head(["kernel", "launches a step", "µs a step", "of the step"], 1)
    shown = [kernel for kernel in record.kernels if kernel.us >= SHOWN * record.profiled_us]
    others = record.kernels[len(shown) :]
    rows = [(f"`{_short(kernel.name)}`", kernel.launches, kernel.us) for kernel in shown]
    if others:
        rows.append((f"{len(others)} others", sum(k.launches for k in others), sum(k.us for k in others)))
    for name, launches, us in rows:
        lines.append(table_row([name, f"{launches:.4g}", _us(us), f"{us / record.profiled_us:.0%}"]))
    gaps = record.profiled_us - record.busy_us
    streams, where = counted(record.streams, "sequence"), machine_line(record)
    lines.append(table_row(["no kernel runs", "", _us(gaps), f"{gaps / record.profiled_us:.0%}"]))
    notes = [
        f"A decode step of {record.workload} with {record.model} in {record.dtype}, {streams}, "
        f"on average over {record.steps}: {_us(record.step_us)} µs without the profiler, "
        f"{_us(record.profiled_us)} with it, {_us(record.busy_us)} of them with a kernel running. {where}",
        f"Raw: `{path}`.",
    ]
    return "\n".join([*lines, "", *notes])


def table_head(cells: list[str], names: int) -> list[str]:
    """The first two lines of a table: `names` columns of text, the rest numbers."""
    return [table_row(cells), table_row(["---"] * names + ["---:"] * (len(cells) - names))]


def _short(name: str) -> str:
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1] + "…"


def _us(microseconds: float) -> str:
    if math.isnan(microseconds):
        return NOT_MEASURED
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"


def _kernel_rate(row: KernelRow) -> str:
    return f"{row.flops / row.us / 1e6:,.0f} TFLOP/s" if row.flops else f"{row.gb_s:,.0f} GB/s"


def table_row(cells: list[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def _rate(row: Summary | None) -> str:
    return NOT_MEASURED if row is None else f"{row.tok_s:,.0f}" if row.tok_s >= 100 else f"{row.tok_s:.1f}"


def _ratio(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else f"{ratio:.2f}"


def _repeats(record: Record) -> str:
    counts = {row.repeats for row in record.summary}  # the same for all in one session
    return f"{counted(min(counts), 'run')} of each"


def counted(number: int, noun: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def machine_line(record: AnyRecord) -> str:
    """Chip, torch, day and commit, as a sentence."""
    machine, on_gpu = record.machine, record.device.startswith("cuda")
    chip = machine.gpus[0].name if machine.gpus and on_gpu else f"{machine.cpu}, {counted(machine.threads, 'thread')}"
    commit = f"commit {machine.commit[:7]}" if machine.commit else "no commit known"
    changed = " with changes" if machine.tree_clean is False else ""
    return f"{chip}, torch {machine.packages.get('torch')}, {record.date[:10]}, {commit}{changed}."


def _streams(by_place: dict[tuple[str, str], Summary]) -> str:
    one, eight = by_place.get(("decode1", OURS)), by_place.get(("decode8", OURS))
    return f"Eight streams give {eight.tok_s / one.tok_s:.1f} times the tokens of one." if one and eight else ""


def _step_cost(cost: StepCost | None) -> str:
    if cost is None:
        return ""
    return (
        f"A step at {cost.streams} streams takes {cost.step_ms:.1f} ms: {cost.model_ms:.1f} in the model, "
        f"{cost.own_ms:.2f} around it ({cost.runner_ms:.2f} buffers and sampling, {cost.scheduler_ms:.2f} scheduler, "
        f"{cost.caller_ms:.2f} outputs)."
    )


def _memory(record: Record) -> str:
    memory: Memory | None = record.memory
    if memory is None:
        return ""
    mib = 1 << 20
    if record.device.startswith("cuda"):
        return (
            f"On the GPU, weights are {memory.weights_bytes / mib:,.0f} MiB, the KV cache {memory.kv_bytes / mib:,.0f}."
        )
    added, peak = (b - memory.before_bytes for b in (memory.after_load_bytes, memory.peak_load_bytes))
    return (
        f"Loading adds {added / mib:,.0f} MiB of resident memory (at its peak {peak / mib:,.0f}); "
        f"weights are {memory.weights_bytes / mib:,.0f} MiB, the KV cache {memory.kv_bytes / mib:,.0f}."
    )
