"""`labkit bench serve`: servers under the same load in one session, in turn, and on demand our engine without HTTP.

As in `bench offline`, engines take turns, in the second half of the repeats in the opposite order. All are loaded all
the time; one that is not asked does nothing. Every repeat has prompts of its own, the same for all engines.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from labkit.bench.load.arrivals import Arrival, Closed
from labkit.bench.load.client import Target
from labkit.bench.load.contestants import Contestant, Offline, OverHttp
from labkit.bench.load.numbers import compare
from labkit.bench.load.record import SCHEMA, LoadRun, Objective, ServeRecord, TokenCheck
from labkit.bench.load.servers import Place, Remote, engine_fields, start_ours, start_vllm
from labkit.bench.load.workloads import LARGEST_ID, Load, make_load, shape_of
from labkit.bench.machine import describe_machine
from labkit.bench.offline import turns
from labkit.bench.peers import NotMeasuredError
from labkit.config import EngineConfig
from labkit.errors import LabkitError
from labkit.kernels import backend
from labkit.models.checkpoint import open_checkpoint
from labkit.models.sources import resolve

WARM_UP_SEED = 1_000_000  # prompts that no measured run has
MOST_SEQS = 256  # in a step, under an open loop
LENGTH_STEP = 256
SERVER = "server"  # what one behind a URL is called
WARM_UP_CLIENTS = 16  # under an open loop


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        model: a name for the server; for one that is started here, as `labkit serve` takes it.
        url: of a server that runs already; None starts ours.
        workloads, arrivals: each of the one under each of the other; no arrivals means the workloads' own.
        requests: in a run; None as many as the workload and its arrival have.
        vllm, offline: run in turn with us.
        engine: fields of EngineConfig for the server that is started here, and for the offline engine.
        prefix_caching: None switches it on where prompts begin alike.
        memory_share: of the GPU, for each engine.
        vocab_size: of the model behind the URL; prompts are drawn from ids below it.
        processes: of clients; None as many as suit.
    """

    model: str
    url: str | None = None
    key: str = Target.key
    api: str = "completions"
    workloads: tuple[str, ...] = ("http64",)
    arrivals: tuple[Arrival, ...] = ()
    requests: int | None = None
    repeats: int = 2
    seed: int = 0
    objective: Objective = field(default_factory=Objective)
    vllm: bool = False
    offline: bool = False
    ignore_eos: bool = True
    prefix_caching: bool | None = None
    device: str = "auto"
    memory_share: float = 0.9
    vocab_size: int | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    processes: int | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The model, as far as it is known here: one behind a URL is known by its name only."""

    name: str
    dtype: str
    vocab_size: int
    max_model_len: int | None


def measure(
    settings: Settings, say: Callable[[str], None], keep: Callable[[ServeRecord], None] = lambda record: None
) -> ServeRecord:
    """Run it all; `say` gets a line on what is being done, `keep` after each load all that is measured so far.

    Raises:
        LabkitError: a workload is unknown or longer than the model, or a server cannot be started or asked.
    """
    machine = describe_machine()
    facts = _facts(settings)
    plans = [plan(settings, workload, arrival, facts.vocab_size) for workload, arrival in _pairs(settings)]
    if settings.offline:
        check_offline(settings, plans)
    runs: list[LoadRun] = []
    checks: dict[str, TokenCheck] = {}
    order = itertools.count()

    def record() -> ServeRecord:
        return ServeRecord(
            schema=SCHEMA,
            kind="serve",
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            command=list(settings.command),
            machine=machine,
            model=facts.name,
            device=str(backend.resolve_device(settings.device)),
            dtype=facts.dtype,
            api=settings.api,
            engine_options=settings.engine,
            engines=told,
            token_checks=checks,
            objective=settings.objective,
            runs=list(runs),
            comparisons=compare(facts.name, runs),
        )

    with ExitStack() as until_done:
        contestants, told = _open(settings, facts, plans, until_done, say)
        for warm_up, *loads in plans:
            say(f"{loads[0].name}: {len(loads[0].asks)} requests a run, warming up")
            for contestant in contestants:
                if isinstance(contestant, OverHttp) and contestant.name not in checks:
                    checks[contestant.name] = contestant.check_tokens(warm_up)
                contestant.run(warm_up, Objective(), lambda: None)
            runs += _take_turns(contestants, loads, settings.objective, order)
            keep(record())
    return record()


def _facts(settings: Settings) -> Facts:
    if settings.url is not None:
        return Facts(settings.model, "as served", settings.vocab_size or LARGEST_ID + 1, None)
    checkpoint = open_checkpoint(settings.model)
    dtype = backend.resolve_dtype(settings.engine.get("dtype", "auto"), backend.resolve_device(settings.device))
    config = checkpoint.config
    name = Path(checkpoint.name).name
    return Facts(name, str(dtype).removeprefix("torch."), config.vocab_size, config.max_position_embeddings)


def _pairs(settings: Settings) -> list[tuple[str, Arrival]]:
    return [(name, a) for name in settings.workloads for a in settings.arrivals or (shape_of(name).arrival,)]


def plan(settings: Settings, workload: str, arrival: Arrival, vocab_size: int) -> list[Load]:
    """A warm-up, in which every client sends one request, and then the loads of the repeats."""
    clients = arrival.clients if isinstance(arrival, Closed) else WARM_UP_CLIENTS
    warm_up = make_load(workload, Closed(clients), clients, vocab_size, WARM_UP_SEED)
    seeds = range(settings.seed, settings.seed + settings.repeats)
    return [warm_up, *(make_load(workload, arrival, settings.requests, vocab_size, seed) for seed in seeds)]


def check_offline(settings: Settings, plans: Sequence[Sequence[Load]]) -> None:
    """The offline engine has as many requests in a step as there are clients, so all loads must have as many.

    Raises:
        LabkitError: they have not, or are not of token ids.
    """
    clients = {loads[1].clients for loads in plans}
    if len(clients) > 1 or None in clients or settings.api != "completions":
        raise LabkitError("--offline compares closed loops of one size, of token ids: --workload http16 --offline")


def _take_turns(
    contestants: Sequence[Contestant], loads: Sequence[Load], objective: Objective, order: Iterator[int]
) -> Iterator[LoadRun]:
    for place, contestant in enumerate(turns(len(loads), contestants)):
        load = loads[place // len(contestants)]
        with tqdm(total=len(load.asks), desc=f"{load.name}, {contestant.name}", unit="request", leave=False) as bar:
            ran = contestant.run(load, objective, lambda bar=bar: bar.update())
        yield LoadRun(
            engine=contestant.name,
            order=next(order),
            load=load.name,
            arrival=str(load.arrival),
            clients=load.clients,
            seed=load.seed,
            temperature=load.temperature,
            summary=ran.summary,
            client=ran.client,
            requests=ran.timings,
        )


# ------------------------------------------------------------------------------------------ who is measured


def _open(
    settings: Settings, facts: Facts, plans: Sequence[Sequence[Load]], until_done: ExitStack, say: Callable[[str], None]
) -> tuple[list[Contestant], dict[str, str]]:
    """Start whoever is to be measured; `until_done` ends them. Also returns how each runs, or why it does not."""
    contestants: list[Contestant] = []
    told: dict[str, str] = {}

    def add(contestant: Contestant) -> None:
        until_done.callback(contestant.close)
        contestants.append(contestant)
        told[contestant.name] = contestant.how

    def over_http(server: Remote) -> OverHttp:
        return OverHttp(server, settings.ignore_eos, settings.processes)

    if settings.url is not None:
        target = Target(settings.url.rstrip("/"), settings.model, settings.key, settings.api)
        add(over_http(Remote(SERVER, f"at {target.url}", target)))
        return contestants, told
    place = _place(settings, facts, plans)
    say(f"starting labkit serve with {facts.name}")
    add(over_http(start_ours(place, settings.engine)))
    if settings.offline:
        say(f"loading {facts.name} into an LLM of this process")
        add(Offline(settings.model, _offline_config(place, settings.engine)))
    if settings.vllm:
        say(f"starting vLLM with {facts.name}")
        try:
            add(over_http(start_vllm(replace(place, model=str(resolve(settings.model))))))
        except NotMeasuredError as error:
            told["vllm"] = str(error)
            say(f"vllm: {error}")
    return contestants, told


def _place(settings: Settings, facts: Facts, plans: Sequence[Sequence[Load]]) -> Place:
    """The same terms for all. Raises LabkitError if the model is too short for a load."""
    loads = [load for loads in plans for load in loads]
    longest = max(load.longest for load in loads)
    length = facts.max_model_len or longest
    if longest > length:
        names = ", ".join(dict.fromkeys(load.name for load in loads if load.longest > length))
        raise LabkitError(f"{names}: needs {longest} tokens, the model has {length}; take another --workload")
    shared = any(shape_of(name).shared for name in settings.workloads)
    return Place(
        model=settings.model,
        name=facts.name,
        dtype=facts.dtype,
        max_num_seqs=max(load.clients or MOST_SEQS for load in loads),
        # A chat template adds its own tokens, and words are sometimes two.
        max_model_len=min(length, -(-2 * longest // LENGTH_STEP) * LENGTH_STEP),
        memory_share=settings.memory_share,
        prefix_caching=shared if settings.prefix_caching is None else settings.prefix_caching,
        key=settings.key,
        api=settings.api,
    )


def _offline_config(place: Place, options: dict[str, Any]) -> EngineConfig:
    fields = engine_fields(place) | options
    # A share of the GPU is of all that is in use there: the server before this one counts.
    fields["gpu_memory_utilization"] = min(2 * place.memory_share, 1.0)
    return EngineConfig(**fields)
