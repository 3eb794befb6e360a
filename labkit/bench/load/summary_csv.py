"""What runs came to, as a CSV beside the raw JSON: a line a run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec

from labkit.bench.load.record import LoadRun, ServeRecord
from labkit.bench.record import write_json


def write_serve(record: ServeRecord, path: Path) -> Path:
    """Write the JSON to `path` and the CSV beside it, whose path is returned."""
    write_json(record, path)
    table = path.with_suffix(".csv")
    rows = [{"model": record.model, **flat(run)} for run in record.runs]
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return table


def flat(run: LoadRun) -> dict[str, Any]:
    """One value a column: ttft_ms = {p50, …} as ttft_ms_p50 and so on, errors as how many."""
    columns: dict[str, Any] = {name: getattr(run, name) for name in ("load", "engine", "order", "clients", "seed")}
    for name, value in msgspec.to_builtins(run.summary).items():
        if name == "errors":
            columns[name] = sum(value.values())
        elif isinstance(value, dict):
            columns |= {f"{name}_{percentile}": ms for percentile, ms in value.items()}
        else:
            columns[name] = value
    return columns
