"""Results of `labkit bench` that come with labkit, measured on machines that the learner may not have."""

from __future__ import annotations

from labkit.bench.reading import read_record
from labkit.bench.table import AnyRecord
from labkit.paths import shipped


def recorded(name: str) -> AnyRecord:
    """The newest record of that name, "h200-kernels" for data/recorded/h200-kernels-2026-12-01.json. Says what it is.

    Raises:
        ValueError: there is none.
    """
    folder = shipped("data/recorded")
    found = sorted(folder.glob(f"{name}-[0-9]*.json"), key=lambda path: path.stem) if folder else []
    if not found:
        raise ValueError(f"there is no record {name!r} in data/recorded")
    record = read_record(found[-1])
    machine = record.machine.gpus[0].name if record.machine.gpus else record.machine.cpu
    print(f"{found[-1].name}: {machine}, torch {record.machine.packages['torch']}, measured on {record.date[:10]}")
    return record
