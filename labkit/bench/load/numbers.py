"""From the times of requests to what a run came to."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

from labkit.bench.load.record import LoadRun, LoadSummary, Objective, Spread, Timing
from labkit.bench.record import OURS

# What servers call the histogram of their queue.
QUEUE_SECONDS = ("labkit_request_queue_seconds", "vllm:request_queue_time_seconds")
Buckets = Mapping[float, float]  # upper bound in seconds -> how many in it or below


def summarise(
    timings: Sequence[Timing],
    gaps_s: Sequence[float] | npt.NDArray[np.float32],
    objective: Objective,
    queue_ms: Spread | None = None,
) -> LoadSummary:
    """Rates and percentiles of a run; those of answers are over whole ones only."""
    whole = [t for t in timings if t.error is None]
    seconds = max(t.end_s for t in timings) - min(t.sent_s for t in timings)
    tokens, chunks = sum(t.output_tokens for t in whole), sum(t.chunks for t in whole)
    good = sum(meets(t, objective) for t in whole) if objective != Objective() else None
    return LoadSummary(
        requests=len(timings),
        whole=len(whole),
        errors=dict(Counter(t.error for t in timings if t.error is not None)),
        seconds=round(seconds, 4),
        tok_s=round(tokens / seconds, 2),
        prompt_tok_s=round(sum(t.prompt_tokens for t in whole) / seconds, 2),
        chunks_per_token=round(chunks / tokens, 4) if tokens and chunks else None,
        ttft_ms=spread([ms for t in whole if (ms := ttft_ms(t)) is not None]),
        tpot_ms=spread([ms for t in whole if (ms := tpot_ms(t)) is not None]),
        gap_ms=spread(np.asarray(gaps_s, np.float64) * 1e3),
        e2e_ms=spread([1e3 * (t.end_s - t.sent_s) for t in whole]),
        queue_ms=queue_ms,
        goodput_s=round(good / seconds, 4) if good is not None else None,
        good_share=round(good / len(timings), 4) if good is not None else None,
    )


def ttft_ms(timing: Timing) -> float | None:
    """Milliseconds to the first text; None if there was none."""
    return None if timing.first_s is None else 1e3 * (timing.first_s - timing.sent_s)


def tpot_ms(timing: Timing) -> float | None:
    """Milliseconds an output token took after the first; None with fewer than two."""
    if timing.first_s is None or timing.last_s is None or timing.output_tokens < 2:
        return None
    return 1e3 * (timing.last_s - timing.first_s) / (timing.output_tokens - 1)


def meets(timing: Timing, objective: Objective) -> bool:
    """Whether an answer was whole and as quick as the objective asks. What it has no time of, it meets."""
    pairs = ((ttft_ms(timing), objective.ttft_ms), (tpot_ms(timing), objective.tpot_ms))
    return timing.error is None and all(ms is None or limit is None or ms <= limit for ms, limit in pairs)


def spread(values_ms: Sequence[float] | npt.NDArray[np.float64]) -> Spread | None:
    """None of no values."""
    if not len(values_ms):
        return None
    p50, p95, p99 = np.percentile(values_ms, (50, 95, 99))
    return Spread(round(float(p50), 3), round(float(p95), 3), round(float(p99), 3))


def queue_buckets(metrics: str) -> Buckets | None:
    """The queue's histogram out of a server's /metrics; None if there is none. Of several engines it is the sum."""
    buckets: defaultdict[float, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics):
        if family.name in QUEUE_SECONDS:
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    buckets[float(sample.labels["le"])] += sample.value
    return dict(buckets) or None


def queue_spread(before: Buckets | None, after: Buckets | None) -> Spread | None:
    """Percentiles of what was added between two looks, on a straight line within a bucket as Prometheus does it.

    What lies above the last bound counts as that bound.
    """
    if after is None:
        return None
    bounds = sorted(after)
    counts = [after[bound] - (before or {}).get(bound, 0.0) for bound in bounds]
    if not counts[-1]:
        return None
    finite = [bound for bound in bounds if np.isfinite(bound)]
    below = [0.0, *(count / counts[-1] for count in counts[: len(finite)])]
    p50, p95, p99 = 1e3 * np.interp((0.50, 0.95, 0.99), below, [0.0, *finite])
    return Spread(round(float(p50), 3), round(float(p95), 3), round(float(p99), 3))


def by_engine(runs: Sequence[LoadRun]) -> dict[tuple[str, str], list[LoadRun]]:
    """(load, engine) -> its runs."""
    out: dict[tuple[str, str], list[LoadRun]] = {}
    for run in runs:
        out.setdefault((run.load, run.engine), []).append(run)
    return out


def median_rate(runs: Sequence[LoadRun]) -> float:
    """Output tokens a second."""
    return statistics.median(run.summary.tok_s for run in runs)


def median_ms(runs: Sequence[LoadRun], what: str, percentile: str) -> float | None:
    """Over the runs, of one percentile of one spread, such as ("ttft_ms", "p99"); None if no run has it."""
    spreads = [getattr(run.summary, what) for run in runs]
    values = [getattr(spread, percentile) for spread in spreads if spread is not None]
    return statistics.median(values) if values else None


def compare(model: str, runs: Sequence[LoadRun]) -> list[dict[str, Any]]:
    """A row for each load and peer: {"model", "workload", "tok_s", "vllm_tok_s", "ratio", …}, medians over the runs."""
    groups = by_engine(runs)
    rows = []
    for (load, engine), theirs in groups.items():
        ours = groups.get((load, OURS))
        if engine == OURS or ours is None:
            continue
        rates = median_rate(ours), median_rate(theirs)
        row = {"model": model, "workload": load, "tok_s": rates[0], f"{engine}_tok_s": rates[1]}
        row["ratio"] = round(rates[0] / rates[1], 3) if rates[1] else None
        for what in ("ttft_ms", "tpot_ms"):
            name = f"{what.removesuffix('_ms')}_p99_ms"
            row |= {name: median_ms(ours, what, "p99"), f"{engine}_{name}": median_ms(theirs, what, "p99")}
        rows.append(row)
    return rows
