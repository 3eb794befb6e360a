"""Records of a load or a soak as Markdown."""

from __future__ import annotations

from statistics import median

from labkit.bench.load.numbers import by_engine, median_ms, median_rate
from labkit.bench.load.record import LoadRun, ServeRecord, SoakRecord
from labkit.bench.table import NOT_MEASURED, counted, machine_line, table_head, table_row

BUSY = 0.8  # of a core: from here on a process of clients may be what is measured


def of_serve(record: ServeRecord, path: str) -> str:
    """Every load and engine: rates, and times at the middle and at the 99th percentile; medians over the runs."""
    rates = ["out tok/s", "in tok/s", "chunks a token"]
    times = ["TTFT ms", "TPOT ms", "gap ms", "end to end ms", "queue ms"]
    lines = table_head([f"{record.model}, load", "engine", *rates, *times, "good", "failed"], 2)
    for (load, engine), runs in by_engine(record.runs).items():
        lines.append(table_row([load, engine, *_rates(runs), *_times(runs), _good(runs), _failed(runs)]))
    together = ", in one session, in turn" if len({run.engine for run in record.runs}) > 1 else ""
    runs_each = max(len(runs) for runs in by_engine(record.runs).values())
    notes = [
        f"Times are p50 / p99, medians over {counted(runs_each, 'run')} of each{together}. "
        f"Over HTTP, {record.api}, {record.dtype}. "
        f"Good is the share of answers that met {_objective(record)}. {machine_line(record)}",
        *(f"{name}: {how}." for name, how in record.engines.items()),
        *(f"{c['workload']}: labkit gives {c['ratio']} of {engine}'s tokens." for engine, c in _compared(record)),
        *filter(None, [_counted(record), _clients(record)]),
        f"Raw: `{path}`.",
    ]
    return "\n".join([*lines, "", *notes])


def _rates(runs: list[LoadRun]) -> list[str]:
    prompt = median(run.summary.prompt_tok_s for run in runs)
    chunks = [run.summary.chunks_per_token for run in runs if run.summary.chunks_per_token is not None]
    return [f"{median_rate(runs):,.0f}", f"{prompt:,.0f}", f"{median(chunks):.2f}" if chunks else NOT_MEASURED]


def _times(runs: list[LoadRun]) -> list[str]:
    names = ("ttft_ms", "tpot_ms", "gap_ms", "e2e_ms", "queue_ms")
    return [f"{_ms(median_ms(runs, name, 'p50'))} / {_ms(median_ms(runs, name, 'p99'))}" for name in names]


def _ms(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _good(runs: list[LoadRun]) -> str:
    shares = [run.summary.good_share for run in runs if run.summary.good_share is not None]
    return f"{sum(shares) / len(shares):.0%}" if shares else NOT_MEASURED


def _failed(runs: list[LoadRun]) -> str:
    failed, requests = sum(r.summary.requests - r.summary.whole for r in runs), sum(r.summary.requests for r in runs)
    kinds = sorted({kind for run in runs for kind in run.summary.errors})
    return f"{failed} of {requests}" + (f": {', '.join(kinds)}" if kinds else "")


def _objective(record: ServeRecord) -> str:
    limits = [(record.objective.ttft_ms, "TTFT"), (record.objective.tpot_ms, "TPOT")]
    return " and ".join(f"{name} {ms:g} ms" for ms, name in limits if ms is not None) or "an objective (none was given)"


def _compared(record: ServeRecord) -> list[tuple[str, dict[str, object]]]:
    pairs = []
    for comparison in record.comparisons:
        (engine,) = (k.removesuffix("_tok_s") for k in comparison if k.endswith("_tok_s") and k != "tok_s")
        pairs.append((engine, comparison))
    return pairs


def _counted(record: ServeRecord) -> str:
    """How it is known that the tokens are as many as told."""
    told, requests = [], 0
    for engine, check in record.token_checks.items():
        requests = max(requests, check.requests)
        if check.listed is None:
            told.append(f"{engine} lists no tokens, so they are counted as it tells")
        else:
            chunks = f"in {check.chunks} chunks"
            told.append(f"{engine}: {check.listed} tokens counted one by one {chunks}, {check.usage} by usage")
    return f"Tokens of {counted(requests, 'request')}: {'; '.join(told)}." if told else ""


def _clients(record: ServeRecord) -> str:
    costs = [run.client for run in record.runs if run.client is not None]
    if not costs:
        return ""
    busiest = max(costs, key=lambda cost: cost.cpu_share)
    warning = " They may be what was measured: take more --processes." if busiest.cpu_share > BUSY else ""
    late = max(cost.lag_ms for cost in costs)
    return (
        f"Clients ran in {max(cost.processes for cost in costs)} or fewer processes, the busiest at "
        f"{busiest.cpu_share:.0%} of a core, their stamps up to {late:.1f} ms late (p99).{warning}"
    )


def of_soak(record: SoakRecord, path: str) -> str:
    """What must hold, and what clients did."""
    lines = table_head(["it holds that", "", "found"], 3)
    lines += [table_row([check.name, "yes" if check.passed else "**no**", check.found]) for check in record.checks]
    did = ", ".join(f"{name} {number}" for name, number in record.outcomes.items())
    notes = [
        f"{record.model}, {counted(record.clients, 'client')} for {record.seconds:g} s. They did: {did}.",
        *(f"Wrong: {what}." for what in record.wrong),
        f"{machine_line(record)} Raw: `{path}`.",
    ]
    return "\n".join([*lines, "", *notes])
