"""The clients of a run, in processes of their own, so that they are not what is measured."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from labkit.bench.load.client import Target, fetch, open_session
from labkit.bench.load.record import ClientCost, Timing
from labkit.bench.load.workloads import Ask, Load
from labkit.bench.machine import usable_cores
from labkit.errors import LabkitError

CLIENTS_A_PROCESS = 32
HEARTBEAT_SECONDS = 0.01
START_SECONDS = 120.0

Seconds = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Share:
    """What one process sends. `clients` is None in an open loop."""

    target: Target
    asks: list[Ask]
    clients: int | None
    temperature: float


@dataclass(frozen=True)
class Answered:
    """One request is done; `gaps` are the seconds between its chunks."""

    timing: Timing
    gaps: Seconds


@dataclass(frozen=True)
class Ended:
    """A process is done: when it began (time.monotonic()), its CPU seconds over wall seconds, its heart's delays."""

    began: float
    cpu_share: float
    lag: Seconds


@dataclass(frozen=True)
class Outcome:
    """A run's requests, in the order in which they were sent, all gaps between chunks (seconds), and the cost."""

    timings: list[Timing]
    gaps: Seconds
    client: ClientCost


def processes_for(load: Load) -> int:
    """One for 32 clients, and half of the cores at most: the server needs some as well."""
    clients = load.clients or len(load.asks)
    return max(1, min(-(-clients // CLIENTS_A_PROCESS), usable_cores() // 2))


def run(target: Target, load: Load, processes: int, on_answer: Callable[[], None] = lambda: None) -> Outcome:
    """Send a load and wait for every answer.

    Raises:
        LabkitError: a process of clients ended before it was done.
    """
    # Not forked: this process may hold threads, and CUDA.
    context = mp.get_context("spawn")
    news: Any = context.Queue()
    ready = context.Barrier(processes + 1)
    workers = [context.Process(target=work, args=(share, ready, news)) for share in split(target, load, processes)]
    for worker in workers:
        worker.start()
    try:
        ready.wait(START_SECONDS)
        return _collect(workers, news, on_answer)
    except threading.BrokenBarrierError:
        raise LabkitError("the processes of the clients did not start") from None
    finally:
        for worker in workers:
            worker.terminate()  # does nothing to one that has ended
            worker.join()


def split(target: Target, load: Load, processes: int) -> list[Share]:
    """Every process gets each so many-th request, and its share of the clients."""
    clients = load.clients
    return [
        Share(
            target,
            load.asks[k::processes],
            None if clients is None else clients // processes + (k < clients % processes),
            load.temperature,
        )
        for k in range(processes)
    ]


def _collect(workers: Sequence[Any], news: Any, on_answer: Callable[[], None]) -> Outcome:
    answers: list[Answered] = []
    ended: list[Ended] = []
    while len(ended) < len(workers):
        try:
            item = news.get(timeout=1.0)
        except queue.Empty:
            if any(worker.exitcode for worker in workers):
                raise LabkitError("a process of clients died; its message is above") from None
            continue
        if isinstance(item, Ended):
            ended.append(item)
        else:
            answers.append(item)
            on_answer()
    began = min(end.began for end in ended)
    answers.sort(key=lambda answer: answer.timing.sent_s)
    timings = [since(answer.timing, began) for answer in answers]
    late = [1e3 * (t.sent_s - t.due_s) for t in timings if t.due_s is not None]
    cost = ClientCost(
        processes=len(workers),
        cpu_share=round(max(end.cpu_share for end in ended), 3),
        lag_ms=round(max(1e3 * float(np.percentile(end.lag, 99)) for end in ended), 3),
        late_ms=round(float(np.percentile(late, 99)), 3) if late else None,
    )
    return Outcome(timings, np.concatenate([answer.gaps for answer in answers]), cost)


def since(timing: Timing, began: float) -> Timing:
    """The same with seconds since the run began, to 10 µs."""
    moments = {
        name: None if value is None else round(value - began, 5)
        for name in ("sent_s", "first_s", "last_s", "end_s")
        for value in [getattr(timing, name)]
    }
    gap = timing.longest_gap_s
    return msgspec.structs.replace(timing, **moments, longest_gap_s=None if gap is None else round(gap, 5))


# ------------------------------------------------------------------------------------------ in the clients' process


def work(share: Share, ready: Any, news: Any) -> None:
    """A process's main function."""
    ready.wait(START_SECONDS)
    began, cpu = time.monotonic(), time.process_time()
    lag = asyncio.run(drive(share, began, news.put))
    news.put(Ended(began, (time.process_time() - cpu) / (time.monotonic() - began), np.array(lag, np.float32)))


async def drive(share: Share, began: float, report: Callable[[Answered], None]) -> list[float]:
    """Send all requests of a share; returns by how many seconds each heartbeat was late."""
    lag: list[float] = [0.0]
    async with open_session(share.target) as session:

        async def one(ask: Ask) -> None:
            timing, received = await fetch(session, share.target, ask, share.temperature)
            report(Answered(timing, np.diff(np.array(received.stamps)).astype(np.float32)))

        async def client(todo: Iterator[Ask]) -> None:
            for ask in todo:
                await one(ask)

        heart = asyncio.create_task(beat(lag))
        async with asyncio.TaskGroup() as group:
            if share.clients is not None:
                todo = iter(share.asks)  # that all clients take from
                for _ in range(share.clients):
                    group.create_task(client(todo))
            else:
                for ask in share.asks:
                    await asyncio.sleep(max(0.0, began + (ask.due_s or 0.0) - time.monotonic()))
                    group.create_task(one(ask))
        heart.cancel()
    return lag


async def beat(lag: list[float]) -> None:
    """Note how much later than asked for this task is woken: so much later are stamps."""
    while True:
        asleep = time.monotonic()
        await asyncio.sleep(HEARTBEAT_SECONDS)
        lag.append(time.monotonic() - asleep - HEARTBEAT_SECONDS)
