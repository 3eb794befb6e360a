"""Throughput and time to first token over the load."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from labkit.bench.load.numbers import by_engine, median_ms, median_rate
from labkit.bench.load.record import ServeRecord
from labkit.bench.plots import BLUE, GREEN, GREY, ORANGE

STYLES = ((BLUE, "o-"), (ORANGE, "s--"), (GREEN, "^:"), (GREY, "d-."))  # colour and, for who sees none, mark and line


def draw_load(record: ServeRecord, path: Path) -> Path:
    """Draw a record's medians into a PNG: above tokens a second, below milliseconds, a place for each load."""
    groups = by_engine(record.runs)
    loads = list(dict.fromkeys(load for load, _ in groups))
    engines = list(dict.fromkeys(engine for _, engine in groups))
    figure = Figure(figsize=(3.0 + 1.1 * len(loads), 6), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True)
    for engine, (colour, style) in zip(engines, STYLES):
        places = [x for x, load in enumerate(loads) if (load, engine) in groups]
        runs = [groups[loads[x], engine] for x in places]
        top.plot(places, [median_rate(r) for r in runs], style, color=colour, label=engine)
        for percentile, filled in (("p50", colour), ("p99", "white")):
            times = [(x, ms) for x, r in zip(places, runs) if (ms := median_ms(r, "ttft_ms", percentile)) is not None]
            if times:
                label = f"{engine} {percentile}"
                below.plot(*zip(*times), style, color=colour, markerfacecolor=filled, label=label)
    top.set_ylabel("output tok/s")
    top.set_ylim(bottom=0)
    below.set_ylabel("time to first token, ms")
    below.set_yscale("log")
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter("{x:g}")
    below.set_xticks(range(len(loads)), loads, fontsize=8, rotation=20, ha="right")
    for axes in (top, below):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    on_gpu = record.machine.gpus and record.device.startswith("cuda")
    chip = record.machine.gpus[0].name if on_gpu else record.machine.cpu
    figure.suptitle(f"{record.model}, {record.dtype}, {chip}, {record.date[:10]}", fontsize=9)
    figure.savefig(path, dpi=110)
    return path
