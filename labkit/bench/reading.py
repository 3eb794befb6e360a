"""Recorded files, whichever command wrote them: read, as a table, and as the block of a page between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from labkit.bench import table
from labkit.bench.kernels import KernelRecord
from labkit.bench.load.record import ServeRecord, SoakRecord
from labkit.bench.load.tables import of_serve, of_soak
from labkit.bench.profile import ProfileRecord
from labkit.bench.record import Record
from labkit.bench.table import AnyRecord
from labkit.errors import LabkitError

KINDS: dict[str, type[AnyRecord]] = {
    "offline": Record,
    "kernels": KernelRecord,
    "profile": ProfileRecord,
    "serve": ServeRecord,
    "soak": SoakRecord,
}
BLOCK = re.compile(r"(<!-- measured: begin.*?-->\n).*?(<!-- measured: end -->)", re.DOTALL)


class _Kind(msgspec.Struct):
    kind: str


def read_record(path: Path) -> AnyRecord:
    """Read a JSON that one of the commands wrote.

    Raises:
        LabkitError: the file is not there, or is not such a record.
    """
    try:
        data = path.read_bytes()
        kind = msgspec.json.decode(data, type=_Kind).kind
        if kind not in KINDS:
            raise LabkitError(f"{path} is not a record of `labkit bench`: there is no kind {kind!r}")
        return msgspec.json.decode(data, type=KINDS[kind])
    except OSError as error:
        raise LabkitError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise LabkitError(f"{path} is not a record of `labkit bench`: {error}") from error


def markdown(path: Path) -> str:
    """A file's table."""
    record, name = read_record(path), path.as_posix()
    match record:
        case KernelRecord():
            return table.of_kernels(record, name)
        case ProfileRecord():
            return table.of_profile(record, name)
        case ServeRecord():
            return of_serve(record, name)
        case SoakRecord():
            return of_soak(record, name)
        case Record():
            return table.of_offline(record, name)


def tables(paths: Sequence[Path]) -> str:
    """One after the other."""
    return "\n\n".join(map(markdown, paths))


def write_block(page: Path, text: str) -> None:
    """Put text between the marks of a page, `<!-- measured: begin … -->` and `<!-- measured: end -->`.

    Raises:
        LabkitError: the page is not there or has no such marks.
    """
    try:
        before = page.read_text(encoding="utf-8")
    except OSError as error:
        raise LabkitError(f"cannot read {page}: {error.strerror}") from error
    after, count = BLOCK.subn(lambda marks: f"{marks[1]}{text}\n{marks[2]}", before)
    if count != 1:
        marks = "`<!-- measured: begin -->` and `<!-- measured: end -->`"
        raise LabkitError(f"{page} must have one block between {marks}, it has {count}")
    page.write_text(after, encoding="utf-8")
