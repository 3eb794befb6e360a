"""`labkit bench offline`: our engine, and on demand its peers, over the same workloads in one session.

Engines take turns (ours, peer, ours, peer, …), for the second half of the repeats in the opposite order, so that a
machine that gets slower or warmer meanwhile favours nobody. Medians are compared; every single run is in the record.
"""

from __future__ import annotations

import datetime
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from labkit.bench.machine import describe_machine
from labkit.bench.ours import Labkit
from labkit.bench.peers import Engine, NotMeasuredError, Terms, open_peers
from labkit.bench.record import SCHEMA, Record, RequestTimes, Run, Summary, WorkloadRecord, compare, summarise
from labkit.bench.workloads import CPU_WORKLOADS, CUDA_WORKLOADS, Answer, Workload, make_workload
from labkit.config import EngineConfig
from labkit.engine.trace import Trace
from labkit.errors import LabkitError
from labkit.kernels import backend
from labkit.models.checkpoint import open_checkpoint
from labkit.models.sources import resolve

# Tokens out of a warm-up, at most. On a GPU a workload is run whole: the first time that a batch has some size costs
# compiling kernels and recording a graph, in every engine.
WARM_UP = {"cpu": 16, "cuda": 1024}
STEP_COST_STREAMS = 8


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        workloads: names; empty means those that suit the device.
        peers: names, of `PEERS`.
        repeats: runs of each engine on each workload, after the warm-up.
        engine: as given; the KV pool and the model's length are cut to what the workloads need unless given.
        variants: what it is called -> options; for each of them our engine once more, otherwise as in `engine`.
    """

    model: str
    workloads: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    repeats: int = 4
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(enable_prefix_caching=False))
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    trace: Path | None = None
    command: tuple[str, ...] = ()


def measure(settings: Settings, say: Callable[[str], None]) -> Record:
    """Run it all; `say` gets a line on what is being done.

    Raises:
        LabkitError: a workload is unknown or longer than the model, or the model cannot be loaded.
    """
    device = backend.resolve_device(settings.engine.device)
    machine = describe_machine()
    checkpoint = open_checkpoint(settings.model)
    names = tuple(dict.fromkeys(settings.workloads)) or (CUDA_WORKLOADS if device.type == "cuda" else CPU_WORKLOADS)
    workloads = [make_workload(name, checkpoint.config.vocab_size) for name in names]
    name, parameters = Path(checkpoint.name).name, checkpoint.num_parameters
    config = fitted(settings.engine, workloads, checkpoint.config.max_position_embeddings, device)
    del checkpoint
    gc.collect()

    say(f"loading {name} into labkit")
    ours = Labkit(settings.model, config, Trace(settings.trace) if settings.trace else None)
    engines: list[Engine] = [ours]
    peers: dict[str, str] = {}
    try:
        say("one run for memory and the cost of a step")
        ours.run(workloads[0].shortened(WARM_UP["cpu"]))
        memory = ours.memory()
        eight = next((w for w in workloads if len(w.prompts) == STEP_COST_STREAMS and w.counts == "output"), None)
        step_cost = ours.step_cost(eight) if eight and device.type == "cpu" else None
        for place, (variant, options) in enumerate(settings.variants.items(), 2):
            say(f"loading {name} into labkit, {variant}")
            # A share of the GPU is of all that is in use there: the engines before this one count.
            share = min(place * config.gpu_memory_utilization, 1.0)
            engines.append(
                Labkit(settings.model, config.replace(gpu_memory_utilization=share, **options), None, variant)
            )
            peers[variant] = f"labkit with {variant}, otherwise the same"
        if settings.peers:
            found, told = _open_peers(settings, ours, device, workloads, say)
            engines += found
            peers |= told
        records, rows = _run_all(engines, workloads, settings.repeats, peers, WARM_UP[device.type], say)
    finally:
        for engine in engines:
            engine.close()
    return Record(
        schema=SCHEMA,
        kind="offline",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=list(settings.command),
        machine=machine,
        model=name,
        parameters=parameters,
        dtype=ours.dtype,
        device=str(device),
        engine_options={key: plain(value) for key, value in vars(ours.config).items()},
        peers=peers,
        workloads=records,
        summary=rows,
        comparisons=compare(name, rows),
        step_cost=step_cost,
        memory=memory,
    )


def fitted(config: EngineConfig, workloads: Sequence[Workload], model_len: int, device: torch.device) -> EngineConfig:
    """The options with length and, on a CPU, KV pool cut to what the workloads need, where they were not given.

    Raises:
        LabkitError: the model is too short for a workload.
    """
    longest = max(w.longest for w in workloads)
    if longest > model_len:
        names = ", ".join(w.name for w in workloads if w.longest > model_len)
        raise LabkitError(f"{names}: needs {longest} tokens, the model has {model_len}; leave it out with --workload")
    block = config.block_size
    blocks = config.num_kv_blocks
    if blocks is None and device.type == "cpu":
        blocks = max(
            sum(-(-(len(prompt) + out) // block) for prompt, out in zip(w.prompts, w.max_tokens)) for w in workloads
        )
    # One more than the longest: the last token drawn is never computed, but a request has to fit.
    length = config.max_model_len or min(model_len, longest + 1)
    return config.replace(max_model_len=length, num_kv_blocks=blocks)


def _open_peers(
    settings: Settings,
    ours: Labkit,
    device: torch.device,
    workloads: Sequence[Workload],
    say: Callable[[str], None],
) -> tuple[list[Engine], dict[str, str]]:
    say("loading the peers")
    terms = Terms(
        path=resolve(settings.model),
        dtype=getattr(torch, ours.dtype),
        device=device,
        longest=max(w.longest for w in workloads),
        streams=max(len(w.prompts) for w in workloads),
        memory_share=ours.config.gpu_memory_utilization,
    )
    found, told = open_peers(settings.peers, terms)
    for name, how in told.items():
        say(f"{name}: {how}")
    # Their libraries are a million objects that would be looked through for garbage while engines in this process run.
    gc.collect()
    gc.freeze()
    return found, told


def _run_all(
    engines: Sequence[Engine],
    workloads: Sequence[Workload],
    repeats: int,
    peers: dict[str, str],
    warm_up: int,
    say: Callable[[str], None],
) -> tuple[list[WorkloadRecord], list[Summary]]:
    """Every workload in turn, our engine first. A peer that refuses one is left out of it, and `peers` says so."""
    records, rows = [], []
    order, ours = itertools.count(), engines[0]
    dtypes = {engine.name: engine.dtype for engine in engines}
    for workload in workloads:
        say(f"{workload.name}: {len(workload.prompts)} requests, warming up")
        able = []
        for engine in engines:
            try:
                engine.run(workload.shortened(warm_up))
                able.append(engine)
            except NotMeasuredError as error:
                peers[engine.name] += f"; {workload.name} {error}"
        record, answers = _take_turns(able, workload, repeats, order)
        records.append(record)
        agreement = {name: agree(answers[ours.name], answer) for name, answer in answers.items() if name != ours.name}
        rows += summarise(record, dtypes, {} if workload.temperature else agreement)
    return records, rows


def turns(repeats: int, engines: Sequence[Any]) -> list[Any]:
    """Who runs when: all of them once a repeat, the second half of the repeats the other way round."""
    out: list[Any] = []
    for repeat in range(repeats):
        out += engines if repeat < (repeats + 1) // 2 else reversed(engines)
    return out


def _take_turns(
    engines: Sequence[Engine], workload: Workload, repeats: int, order: Any
) -> tuple[WorkloadRecord, dict[str, Answer]]:
    """Returns the record, and of each engine its last answer."""
    runs, answers = [], {}
    bar = tqdm(turns(repeats, engines), desc=workload.name, unit="run", leave=False)
    for engine in bar:
        bar.set_postfix_str(engine.name)
        gc.collect()
        answer = engine.run(workload)
        check_lengths(engine.name, workload, answer)
        answers[engine.name] = answer
        runs.append(_as_run(engine.name, next(order), workload, answer))
    lengths = [len(prompt) for prompt in workload.prompts]
    record = WorkloadRecord(
        workload.name, workload.seed, workload.counts, workload.temperature, lengths, workload.max_tokens, runs
    )
    return record, answers


def check_lengths(engine: str, workload: Workload, answer: Answer) -> None:
    """An engine that gives back less than it was asked for has not been measured on this workload."""
    received = [len(tokens) for tokens in answer.token_ids]
    if received != list(workload.max_tokens):
        raise LabkitError(
            f"{engine} gave back {sum(received)} tokens on {workload.name}, {sum(workload.max_tokens)} were asked for"
        )


def _as_run(engine: str, order: int, workload: Workload, answer: Answer) -> Run:
    counted = sum(map(len, workload.prompts if workload.counts == "prompt" else answer.token_ids))
    requests = [
        RequestTimes(len(prompt), len(tokens), 0.0, first, finished)
        for prompt, tokens, first, finished in zip(
            workload.prompts, answer.token_ids, answer.first_token_s, answer.finished_s
        )
    ]
    return Run(engine, order, answer.seconds, counted / answer.seconds, requests)


def agree(ours: Answer, theirs: Answer) -> float:
    """Share of tokens that are equal up to the first difference of each request: 1.0 if both are the same model."""
    same = total = 0
    for a, b in zip(ours.token_ids, theirs.token_ids, strict=True):
        total += len(a)
        same += next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return same / total


def plain(value: Any) -> Any:
    """An option as JSON holds it."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else dict(value)
