"""The trace: what the engine did, one JSON object an event.

    {"t": 1.25, "step": 17, "ev": "step", "prefill": [["r3", 0, 128]], "decode": ["r1"], "ms": 3.1, "free_blocks": 90}

Widgets, dashboard, plots and tests read this one format. The last events are kept in memory; with a path every
event is written there too, one a line.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from labkit.errors import LabkitError

EVENTS = (
    "step",
    "submit",
    "admit",
    "first_token",
    "finish",
    "preempt",
    "cancel",
    "alloc",
    "free",
    "hit",
    "evict",
    "draft",
    "accept",
    "setting",  # name, value, was: it holds from step `step` on
)


class Trace:
    """Events in order of time; `t` is seconds since the trace began.

    Args:
        path: also write every event to this file (JSON lines), replacing what is there.
        keep: how many of the last events stay in memory.

    Raises:
        LabkitError: the file cannot be written.
    """

    def __init__(self, path: str | Path | None = None, keep: int = 100_000):
        self.events: collections.deque[dict[str, Any]] = collections.deque(maxlen=keep)
        self.step = 0  # number of the step that is being made or run
        self._start = time.monotonic()
        self._encode = msgspec.json.Encoder().encode
        try:
            self._file = open(path, "wb", buffering=1 << 16) if path is not None else None  # noqa: SIM115
        except OSError as error:
            raise LabkitError(f"the trace cannot be written to {path}: {error.strerror}") from error

    def now(self) -> float:
        """Seconds since the trace began."""
        return time.monotonic() - self._start

    def emit(self, ev: str, **fields: Any) -> None:
        """Record an event; a request goes under `req`."""
        event = {"t": round(self.now(), 6), "step": self.step, "ev": ev, **fields}
        self.events.append(event)
        if self._file is not None:
            try:
                self._file.write(self._encode(event) + b"\n")
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
                self._file = None
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk ends the file, not the requests: events stay in memory only from here on."""
        file, self._file = self._file, None
        print(f"labkit: the trace file ends here: {error}", file=sys.stderr)
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
