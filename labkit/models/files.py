"""The files of a model folder, before they are opened."""

from __future__ import annotations

from pathlib import Path

from labkit.errors import ModelError

MAX_TEXT_BYTES = 64 << 20  # of a file that is read whole; the largest there are have a few megabytes


def check_file(path: Path, most: int | None = MAX_TEXT_BYTES) -> None:
    """A pipe or a device could keep its reader waiting for ever, or never end.

    Raises:
        ModelError: it is there, but no regular file, or larger than that.
    """
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} is {'a folder' if path.is_dir() else 'a pipe or a device'}; it must be a file")
    if most is not None and path.exists() and path.stat().st_size > most:
        raise ModelError(f"{path} has {path.stat().st_size:,} bytes; a file of its kind has at most {most:,}")
