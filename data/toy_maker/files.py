"""Files that are either whole or not there."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


def atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` with a path beside the real one, then move it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """One JSON value a line, gzipped."""

    def write(part: Path) -> None:
        with gzip.open(part, "wt", encoding="utf-8", compresslevel=3) as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    atomically(path, write)


def read_lines(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
