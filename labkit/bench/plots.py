"""Pictures: a trace as a timeline (PNG, or JSON for Perfetto), a record as bars.

r0  ░░░██████████▏▏▏▏▏▏▏▏▏▏▏      ░ waiting   █ prefill (height: all of the row)   ▏ one decode step
r1  ░░░░░░░░░██████▏▏▏▏▏▏×        × preempted or cancelled
─────────────────────────────▶ seconds
free blocks, tokens in each step
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.bench.record import Record
from labkit.errors import LabkitError

# Okabe and Ito's colours, which colour-blind readers tell apart. Each kind has a hatch or a height of its own too.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#BBBBBB"
MARKS = {"preempt": ("v", RED), "cancel": ("x", "black"), "finish": ("|", "black"), "first_token": (".", "black")}
Span = tuple[float, float]  # begin and length, seconds


@dataclass
class Row:
    """One request's line in the timeline."""

    waiting: list[Span] = field(default_factory=list)
    prefill: list[Span] = field(default_factory=list)
    decode: list[Span] = field(default_factory=list)
    marks: list[tuple[str, float]] = field(default_factory=list)  # event, time


@dataclass
class Timeline:
    """A trace, sorted by request; the last two lists have an entry a step."""

    rows: dict[str, Row]
    free_blocks: list[tuple[float, int]]
    tokens: list[tuple[float, int, int]]  # begin of the step, prefill tokens, decode tokens


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file.

    Raises:
        LabkitError: it is not there, has no event, or a line is none (the last line may be cut off: a run that died).
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LabkitError(f"cannot read {path}: {error.strerror}") from error
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            event = msgspec.json.decode(line)
            event["ev"], float(event["t"])
        except (msgspec.DecodeError, TypeError, KeyError, ValueError) as error:
            if number == len(lines) and events:
                break
            raise LabkitError(f"{path} is not a trace: line {number} is no event ({error})") from error
        events.append(event)
    if not events:
        raise LabkitError(f"{path} holds no event; write a trace with `labkit bench offline --trace {path}`")
    return events


def timeline(events: list[dict[str, Any]]) -> Timeline:
    """Sort events by request. A step is reported when it ends, so it began `ms` before its `t`."""
    out = Timeline({}, [], [])
    waiting_since: dict[str, float] = {}
    for event in events:
        kind, t = event["ev"], event["t"]
        if kind == "step":
            span = (t - event["ms"] / 1e3, event["ms"] / 1e3)
            for req, _, _ in event["prefill"]:
                out.rows.setdefault(req, Row()).prefill.append(span)
            for req in event["decode"]:
                out.rows.setdefault(req, Row()).decode.append(span)
            out.free_blocks.append((t, event["free_blocks"]))
            out.tokens.append((span[0], sum(length for _, _, length in event["prefill"]), len(event["decode"])))
        elif "req" in event:
            row = out.rows.setdefault(event["req"], Row())
            if kind in ("submit", "preempt"):
                waiting_since[event["req"]] = t
            elif event["req"] in waiting_since and kind in ("admit", "cancel", "finish"):
                begin = waiting_since.pop(event["req"])
                row.waiting.append((begin, t - begin))
            if kind in MARKS:
                row.marks.append((kind, t))
    return out


def draw_timeline(events: list[dict[str, Any]], path: Path) -> Path:
    """Draw a trace into a PNG."""
    data = timeline(events)
    height = min(30.0, 2.6 + 0.22 * len(data.rows))
    figure = Figure(figsize=(12, height), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(1.0, height - 1.8), 1.2])
    for line, row in enumerate(data.rows.values()):
        top.broken_barh(row.waiting, (line - 0.1, 0.2), color=GREY)
        top.broken_barh(row.prefill, (line - 0.4, 0.8), facecolor=ORANGE, hatch="//", edgecolor="white", linewidth=0.3)
        top.broken_barh(row.decode, (line - 0.25, 0.5), facecolor=BLUE, edgecolor="white", linewidth=0.2)
        for kind, t in row.marks:
            marker, colour = MARKS[kind]
            top.plot([t], [line], marker, color=colour, markersize=6 if kind != "first_token" else 4)
    _name_rows(top, list(data.rows))
    _legend(top)
    _draw_steps(below, data)
    figure.savefig(path, dpi=110)
    return path


def _name_rows(axes: Axes, names: list[str]) -> None:
    every = -(-len(names) // 120)  # a label on each row as long as they are legible
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=7)
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axes.set_title("requests over time", loc="left", fontsize=10)


def _legend(axes: Axes) -> None:
    handles: list[Artist] = [
        Patch(color=GREY, label="waiting"),
        Patch(facecolor=ORANGE, hatch="//", edgecolor="white", label="prefill"),
        Patch(color=BLUE, label="decode"),
    ]
    for kind, (marker, colour) in MARKS.items():
        handles.append(Line2D([], [], marker=marker, color=colour, linestyle="", label=kind.replace("_", " ")))
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=7, fontsize=8, frameon=False)


def _draw_steps(axes: Axes, data: Timeline) -> None:
    times = [t for t, _, _ in data.tokens]
    axes.step(times, [p + d for _, p, d in data.tokens], where="post", color=GREEN, linewidth=0.9)
    axes.set_ylabel("tokens a step", color=GREEN, fontsize=8)
    axes.set_xlabel("seconds since the engine's start", fontsize=8)
    right = axes.twinx()
    right.step(*zip(*data.free_blocks or [(0.0, 0)]), where="post", color=RED, linestyle="--", linewidth=0.9)
    right.set_ylabel("free blocks (dashed)", color=RED, fontsize=8)
    right.set_ylim(bottom=0)


def write_perfetto(events: list[dict[str, Any]], path: Path) -> Path:
    """Write a trace as the JSON that ui.perfetto.dev opens: a track a request, counters, microseconds.

    Format: "Trace Event Format" (Chrome); X complete event, i instant, C counter, M metadata.
    """
    data = timeline(events)
    out: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "labkit"}}]
    for tid, (req, row) in enumerate(data.rows.items(), start=1):
        track = {"pid": 1, "tid": tid}
        out.append({"ph": "M", "name": "thread_name", "args": {"name": req}, **track})
        for name, spans in (("waiting", row.waiting), ("prefill", row.prefill), ("decode", row.decode)):
            out += [{"ph": "X", "name": name, "ts": _us(begin), "dur": _us(s), **track} for begin, s in spans]
        out += [{"ph": "i", "s": "t", "name": kind, "ts": _us(t), **track} for kind, t in row.marks]
    for t, free in data.free_blocks:
        out.append({"ph": "C", "pid": 1, "name": "free blocks", "ts": _us(t), "args": {"blocks": free}})
    for t, prefill, decode in data.tokens:
        args = {"prefill": prefill, "decode": decode}
        out.append({"ph": "C", "pid": 1, "name": "tokens a step", "ts": _us(t), "args": args})
    path.write_bytes(msgspec.json.encode({"traceEvents": out, "displayTimeUnit": "ms"}))
    return path


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def draw_record(record: Record, path: Path) -> Path:
    """Draw a record's medians as bars, with the range of all runs as a line, a group for each workload."""
    groups = [w.name for w in record.workloads]
    figure = Figure(figsize=(1.6 + 2.6 * len(groups), 4), layout="constrained")
    engines = list(dict.fromkeys(row.engine for row in record.summary))
    styles = dict(zip(engines, [(BLUE, ""), (ORANGE, "//"), (GREEN, ".."), (GREY, "xx")]))
    for axes, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups):
        rows = [row for row in record.summary if row.workload == group]
        for x, row in enumerate(rows):
            colour, hatch = styles[row.engine]
            error = [[row.tok_s - row.tok_s_min], [row.tok_s_max - row.tok_s]]
            axes.bar(x, row.tok_s, color=colour, hatch=hatch, edgecolor="white", yerr=error, capsize=4)
            axes.text(
                x,
                row.tok_s / 20,
                f"{row.tok_s:.4g}",
                ha="center",
                va="bottom",
                fontsize=9,
                bbox={"facecolor": "white", "pad": 1},
            )
        axes.set_xticks(range(len(rows)), [row.engine for row in rows], fontsize=8)
        axes.set_title(f"{group}: {rows[0].counts} tok/s", fontsize=9)
    on_gpu = record.machine.gpus and record.device.startswith("cuda")
    chip = record.machine.gpus[0].name if on_gpu else record.machine.cpu
    figure.suptitle(f"{record.model}, {record.dtype}, {chip}, {record.date[:10]}", fontsize=9)
    figure.savefig(path, dpi=110)
    return path
