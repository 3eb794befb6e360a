"""When requests arrive.

closed loop   a fixed number of clients, each sends its next request when it has its answer: a slow server is
              asked less. Shows throughput.
open loop     requests come at their times, whatever the server does: Poisson, bursts, or as recorded.
              A server that is too slow gets a queue. Shows what users wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

import msgspec

from labkit.errors import LabkitError


@dataclass(frozen=True)
class Closed:
    """That many clients, each with one request at a time."""

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} client{'s' if self.clients != 1 else ''}"


@dataclass(frozen=True)
class Poisson:
    """Independent of one another, `rate` a second on average: gaps are exponentially distributed."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g}/s"


@dataclass(frozen=True)
class Bursts:
    """`size` at once; the bursts come like Poisson's, so that it is `rate` requests a second on average."""

    rate: float
    size: int

    def __str__(self) -> str:
        return f"{self.rate:g}/s in bursts of {self.size}"


class Row(msgspec.Struct, frozen=True):
    """One line of a recording."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Recorded:
    """As a file has it."""

    source: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return f"as in {self.source}"


Arrival = Closed | Poisson | Bursts | Recorded


def times(arrival: Arrival, count: int, r: Random) -> list[float | None]:
    """When each of `count` requests is due, in seconds since the first one's; None in a closed loop.

    Raises:
        LabkitError: a recording is shorter than that.
    """
    match arrival:
        case Closed():
            return [None] * count
        case Poisson(rate=rate):
            return [0.0, *accumulate(r.expovariate(rate) for _ in range(count - 1))]
        case Bursts(rate=rate, size=size):
            begins = [0.0, *accumulate(r.expovariate(rate / size) for _ in range((count - 1) // size))]
            return [begins[number // size] for number in range(count)]
        case Recorded(source=source, rows=rows):
            if count > len(rows):
                raise LabkitError(f"{source} holds {len(rows)} requests, {count} were asked for")
            return [row.arrival_s - rows[0].arrival_s for row in rows[:count]]


def read_recording(path: Path) -> Recorded:
    """A JSONL with `arrival_s, prompt_tokens, output_tokens` a line, or a trace of our engine.

    Raises:
        LabkitError: it cannot be read, or holds no request.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise LabkitError(f"cannot read {path}: {error.strerror}") from error
    try:
        if lines and b'"ev"' in lines[0]:
            rows = _of_trace([msgspec.json.decode(line, type=_TraceEvent) for line in lines])
        else:
            rows = [msgspec.json.decode(line, type=Row) for line in lines]
    except msgspec.DecodeError as error:
        raise LabkitError(f"{path} is no recording of requests: {error}") from error
    if not rows or any(row.prompt_tokens < 1 or row.output_tokens < 1 for row in rows):
        raise LabkitError(f"{path} must hold requests, each with a token in and a token out at least")
    return Recorded(path.name, tuple(sorted(rows, key=lambda row: row.arrival_s)))


class _TraceEvent(msgspec.Struct, frozen=True):
    ev: str
    t: float
    req: str = ""
    prompt: int = 0
    decode: list[str] = []


def _of_trace(events: list[_TraceEvent]) -> list[Row]:
    """Of each request: its submission, and a token for its first and for every step that decoded it."""
    tokens: Counter[str] = Counter()
    for event in events:
        tokens.update(event.decode)
        tokens.update([event.req] if event.ev == "first_token" else [])
    return [
        Row(event.t, event.prompt, tokens[event.req])
        for event in events
        if event.ev == "submit" and tokens[event.req]  # those that were never answered say nothing about their length
    ]
