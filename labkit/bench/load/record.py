"""What `labkit bench serve` leaves behind: every request's times, and what they come to."""

from __future__ import annotations

from typing import Any

import msgspec

from labkit.bench.machine import Machine

SCHEMA = 1


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as its client saw it; seconds since the run began.

    Attributes:
        sent_s: when the client began to send it.
        due_s: when it should have been, in an open loop.
        first_s, last_s: the first and the last chunk with text; None without any.
        end_s: the end of the answer, or when it was given up.
        longest_gap_s: between two chunks.
        output_tokens: as `counted_by` tells: "tokens", listed one by one in the chunks; "usage", the server's count at
            the end; "chunks", if it tells neither, which is too few where it puts several tokens into one.
        error: its kind; None for a whole answer.
    """

    sent_s: float
    due_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    end_s: float
    longest_gap_s: float | None = None
    prompt_tokens: int
    output_tokens: int
    counted_by: str = "usage"
    chunks: int = 0
    error: str | None = None


class Spread(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p95: float
    p99: float


class Objective(msgspec.Struct, frozen=True):
    """What an answer must meet to be good; None does not matter."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


class LoadSummary(msgspec.Struct, frozen=True):
    """What a run came to. Tokens are those of whole answers.

    Attributes:
        seconds: from the first request's sending to the last one's end.
        tok_s, prompt_tok_s: output and prompt tokens a second.
        ttft_ms: time to first token: from sending to the first chunk with text.
        tpot_ms: time per output token: from the first chunk to the last one, over the tokens after the first.
        gap_ms: from one chunk to the next.
        e2e_ms: from sending to the end.
        queue_ms: in the server's queue, out of its histogram (interpolated between its buckets); None if it tells not.
        goodput_s: answers a second that met the objective; None without one.
    """

    requests: int
    whole: int
    errors: dict[str, int]
    seconds: float
    tok_s: float
    prompt_tok_s: float
    chunks_per_token: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    gap_ms: Spread | None
    e2e_ms: Spread | None
    queue_ms: Spread | None
    goodput_s: float | None
    good_share: float | None


class ClientCost(msgspec.Struct, frozen=True):
    """What the clients took: a client that is busy all the time measures itself.

    Attributes:
        cpu_share: of one core, by the busiest process.
        lag_ms: how late its event loop was at the 99th percentile, in the worst process.
        late_ms: how long after they were due requests were sent, at the 99th percentile; None in a closed loop.
    """

    processes: int
    cpu_share: float
    lag_ms: float
    late_ms: float | None


class LoadRun(msgspec.Struct, frozen=True):
    """One engine under one load once."""

    engine: str
    order: int  # place in the whole session, 0 first
    load: str
    arrival: str
    clients: int | None
    seed: int
    temperature: float
    summary: LoadSummary
    client: ClientCost | None  # None: no server was asked
    requests: list[Timing]


class TokenCheck(msgspec.Struct, frozen=True):
    """A few requests with every token listed in the chunks: what was counted one by one, and what usage said."""

    requests: int
    listed: int | None  # None: the server lists no tokens
    usage: int | None
    chunks: int


class ServeRecord(msgspec.Struct, frozen=True):
    """One session of `labkit bench serve`."""

    schema: int
    kind: str
    date: str  # ISO 8601, UTC
    command: list[str]
    machine: Machine
    model: str
    device: str
    dtype: str
    api: str  # "completions", with token ids, or "chat", with text
    engine_options: dict[str, Any]  # that our server was given
    engines: dict[str, str]  # name -> version and how it ran, or "not measured: why"
    token_checks: dict[str, TokenCheck]
    objective: Objective
    runs: list[LoadRun]
    comparisons: list[dict[str, Any]]


class Sample(msgspec.Struct, frozen=True):
    """The server's processes at one moment, all of them together; gauges as /metrics has them."""

    t_s: float
    processes: int
    rss_bytes: int
    fds: int
    threads: int
    gauges: dict[str, float]
    tasks: int = 0  # of its event loop; 0 where it does not tell


class Check(msgspec.Struct, frozen=True):
    """Something that must hold, and what was found."""

    name: str
    passed: bool
    found: str


class SoakRecord(msgspec.Struct, frozen=True):
    """One session of `labkit bench soak`."""

    schema: int
    kind: str
    date: str
    command: list[str]
    machine: Machine
    model: str
    device: str
    engine_options: dict[str, Any]
    clients: int
    seconds: float
    seed: int
    outcomes: dict[str, int]  # what clients did and how it ended -> how often
    wrong: list[str]  # the first few of what should not have been
    samples: list[Sample]
    checks: list[Check]
