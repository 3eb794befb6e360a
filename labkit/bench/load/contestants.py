"""What answers a load: a server, or our engine without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from labkit.bench.load import numbers, workers
from labkit.bench.load.client import Target, fetch, open_session
from labkit.bench.load.record import ClientCost, LoadSummary, Objective, Timing, TokenCheck
from labkit.bench.load.servers import Remote
from labkit.bench.load.workloads import Load
from labkit.bench.ours import Labkit
from labkit.bench.workloads import Workload
from labkit.config import EngineConfig
from labkit.errors import LabkitError

OFFLINE = "offline"
CHECKED = 4  # requests whose tokens are counted one by one before anything is measured
LONGEST_DETAIL = 300


@dataclass(frozen=True)
class Ran:
    """One run: every request's times, what they come to, and what the clients took (None without any)."""

    timings: list[Timing]
    summary: LoadSummary
    client: ClientCost | None


class Contestant(Protocol):
    """Something that answers a load."""

    name: str
    how: str

    def run(self, load: Load, objective: Objective, on_answer: Callable[[], None]) -> Ran: ...

    def close(self) -> None: ...


class OverHttp:
    """A server, asked by processes of clients; None of them takes as many as suit the load."""

    def __init__(self, server: Remote, ignore_eos: bool = True, processes: int | None = None):
        self.name, self.how = server.name, server.how
        self._server = server
        self._target = replace(server.target, ignore_eos=ignore_eos)
        self._processes = processes

    def run(self, load: Load, objective: Objective, on_answer: Callable[[], None]) -> Ran:
        before = numbers.queue_buckets(self._server.metrics())
        outcome = workers.run(self._target, load, self._processes or workers.processes_for(load), on_answer)
        queue = numbers.queue_spread(before, numbers.queue_buckets(self._server.metrics()))
        return Ran(outcome.timings, numbers.summarise(outcome.timings, outcome.gaps, objective, queue), outcome.client)

    def check_tokens(self, load: Load) -> TokenCheck:
        """Count tokens one by one: does the server's count at the end of an answer say the same?

        Raises:
            LabkitError: it does not, or the server cannot answer these requests.
        """
        return asyncio.run(check_tokens(replace(self._target, list_tokens=True), load))

    def close(self) -> None:
        self._server.close()


class Offline:
    """`LLM.generate` in this process: no HTTP, no second process, and no text made of the tokens; all else the same."""

    name = OFFLINE

    def __init__(self, model: str, config: EngineConfig):
        self._engine = Labkit(model, config, None, OFFLINE)
        self.how = self._engine.how

    def run(self, load: Load, objective: Objective, on_answer: Callable[[], None]) -> Ran:
        """Its requests are all there at the beginning, so of times only the last one's end means anything."""
        lengths = [ask.max_tokens for ask in load.asks]
        prompts = [ask.prompt for ask in load.asks]
        answer = self._engine.run(Workload(load.name, load.seed, "output", load.temperature, prompts, lengths))
        timings = [
            Timing(
                sent_s=0.0,
                end_s=answer.seconds if end is None else end,
                prompt_tokens=len(prompt),
                output_tokens=len(tokens),
                counted_by="tokens",
            )
            for prompt, tokens, end in zip(prompts, answer.token_ids, answer.finished_s, strict=True)
        ]
        summary = numbers.summarise(timings, [], Objective())
        return Ran(timings, msgspec.structs.replace(summary, e2e_ms=None), None)

    def close(self) -> None:
        self._engine.close()


async def check_tokens(target: Target, load: Load) -> TokenCheck:
    async with open_session(target) as session:
        asks = load.asks[:CHECKED]
        done = [await fetch(session, target, ask, load.temperature) for ask in asks]
    for timing, received in done:
        if timing.error is not None:
            told = f"{timing.error} {received.detail[:LONGEST_DETAIL]}".strip()
            raise LabkitError(f"{target.url} does not answer {load.name} with the model {target.model!r}: {told}")
    listed = [received.listed for _, received in done]
    usage = [received.usage.completion_tokens for _, received in done if received.usage is not None]
    check = TokenCheck(
        requests=len(done),
        listed=sum(n or 0 for n in listed) if any(n is not None for n in listed) else None,
        usage=sum(usage) if len(usage) == len(done) else None,
        chunks=sum(timing.chunks for timing, _ in done),
    )
    if check.listed is not None and check.usage is not None and check.listed != check.usage:
        raise LabkitError(f"{target.url} sent {check.listed} tokens and counts {check.usage}; its rates would be wrong")
    return check
