"""The engine at one moment, as the dashboard draws it: who holds which block, and the last steps.

Taken between two steps from what the engine knows anyway, and bounded in size: of a large pool one cell stands for
several blocks, of a large batch only the first sequences have names.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from labkit.cache.blocks import BlockPool
from labkit.engine.request import Sequence
from labkit.engine.scheduler import Scheduler
from labkit.engine.trace import Trace

MOST_CELLS = 4096
MOST_NAMES = 250  # they fit into a byte, with 0 for nobody
OTHERS = 255  # in `owners`: a sequence without a name here
MOST_STEPS = 48
MOST_IN_STEP = 32  # names in a step of the timeline
MOST_EVENTS = 4000  # of the trace that are looked through for steps

FREE, CACHED, IN_USE, SHARED = range(4)
STATE_OF_USERS = bytes([FREE, IN_USE]).ljust(256, bytes([SHARED]))


@dataclass
class Picture:
    """What `take_picture` gives. It crosses the process boundary.

    Attributes:
        t: seconds on the trace's clock.
        requests: (name, tokens it knows, tokens that are computed) of those that run, in order of rank.
        blocks_per_cell: how many blocks one byte of `states` and `owners` stands for.
        states: FREE, CACHED, IN_USE or SHARED (by several sequences); of a cell's blocks the greatest.
        owners: 1 + the place in `requests` of the first in rank that uses it, 0 for nobody, OTHERS.
        steps: the last `step` events of the trace, the oldest first, each with `more`: names that were left out.
        changes: the last `setting` events of the trace.
        seconds: what it took to take the picture.
    """

    t: float
    requests: list[tuple[str, int, int]]
    blocks_per_cell: int
    states: bytes
    owners: bytes
    steps: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    seconds: float = 0.0


def take_picture(scheduler: Scheduler, trace: Trace, changes: list[dict[str, Any]]) -> Picture:
    """Between two steps, in the engine's thread."""
    begin = perf_counter()
    running, pool = scheduler.running, scheduler.pool
    per_cell = -(-pool.num_blocks // MOST_CELLS)
    picture = Picture(
        t=trace.now(),
        requests=[(seq.id, seq.num_tokens, seq.num_computed) for seq in running[:MOST_NAMES]],
        blocks_per_cell=per_cell,
        states=cell_states(pool, per_cell),
        owners=cell_owners(running, pool.num_blocks, per_cell),
        steps=last_steps(trace),
        changes=changes,
    )
    picture.seconds = perf_counter() - begin
    return picture


def cell_states(pool: BlockPool, per_cell: int) -> bytes:
    """The engine waits for it, so there is no loop in Python over all blocks: a pool may have a million."""
    users = pool.users()
    try:
        counts = bytes(users)
    except ValueError:  # more than a byte holds
        counts = bytes(map(min, users, itertools.repeat(255)))
    states = bytearray(counts.translate(STATE_OF_USERS))
    for block in pool.cached():
        states[block] = CACHED
    if per_cell == 1:
        return bytes(states)
    states += bytes(-len(states) % per_cell)
    return np.frombuffer(states, np.uint8).reshape(-1, per_cell).max(axis=1).tobytes()


def cell_owners(running: Iterable[Sequence], num_blocks: int, per_cell: int) -> bytes:
    owners = bytearray(-(-num_blocks // per_cell))
    for number, seq in reversed(list(enumerate(running, start=1))):  # the first in rank has the last word
        name = number if number <= MOST_NAMES else OTHERS
        for block in seq.block_table:
            owners[block // per_cell] = name
    return bytes(owners)


def last_steps(trace: Trace) -> list[dict[str, Any]]:
    steps = []
    for event in itertools.islice(reversed(trace.events), MOST_EVENTS):
        if event["ev"] == "step":
            steps.append(_cut(event))
            if len(steps) == MOST_STEPS:
                break
    return steps[::-1]


def _cut(event: dict[str, Any]) -> dict[str, Any]:
    """The event with at most MOST_IN_STEP names; what is left out is counted."""
    prefill = event["prefill"][:MOST_IN_STEP]
    decode = event["decode"][: MOST_IN_STEP - len(prefill)]
    left_out = len(event["prefill"]) - len(prefill) + len(event["decode"]) - len(decode)
    return {**event, "prefill": prefill, "decode": decode, "more": left_out}
