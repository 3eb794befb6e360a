"""`labkit bench serve` and `labkit bench soak`: the options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.errors import LabkitError

if TYPE_CHECKING:
    from labkit.bench.load.arrivals import Arrival
    from labkit.bench.load.record import ServeRecord

Model = Annotated[str, typer.Option(help="As labkit serve takes it; with --url, the name that server gives it.")]
Url = Annotated[str | None, typer.Option(help="A server that runs already, without /v1; ours is started unless given.")]
Key = Annotated[str, typer.Option(help="Its key.")]
Engine = Annotated[
    list[str] | None,
    typer.Option(help="An option of the engine that is started: --engine num_kv_blocks=512; may be repeated."),
]
Out = Annotated[Path | None, typer.Option(help="The JSON to write.")]
SHARE_ALONE, SHARE_TOGETHER = 0.9, 0.8  # of the GPU's memory: for our engine, for it and those beside it
NEEDS = "labkit bench serve and soak need aiohttp: pip install aiohttp"


def serve(
    model: Model = "toy",
    workload: Annotated[
        list[str] | None,
        typer.Option(help="chat, rag, coding, support, http64, http256 or httpN for N clients; may be repeated."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, max=1024, help="Closed loop with so many clients; may be repeated.")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=0.001, help="Open loop, so many requests a second; may be repeated.")
    ] = None,
    burst: Annotated[int, typer.Option(min=1, help="With --rate: so many at once.")] = 1,
    replay: Annotated[
        Path | None,
        typer.Option(help="Open loop as in this JSONL: arrival_s, prompt_tokens, output_tokens, or our trace."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="In a run; 4 to 8 a client or 30 s unless given.")] = None,
    url: Url = None,
    key: Key = "dev-key",
    api: Annotated[str, typer.Option(help="completions (token ids) or chat (text).")] = "completions",
    vocab_size: Annotated[int | None, typer.Option(min=2, help="With --url: of its model, where below 10,000.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(min=0, help="Goodput: the first token within this.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(min=0, help="Goodput: a token within this, on average.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="vllm: its server runs in turn with ours.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="LLM.generate in turn with us: what HTTP costs.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each engine under each load.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the first run's requests; each further run has the next.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of full length; OpenAI's servers do not know it.")] = True,
    prefix_caching: Annotated[
        bool | None, typer.Option(help="In the servers started here; on where prompts begin alike unless given.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Of clients; one for 32 clients unless given.")] = None,
    engine: Engine = None,
    out: Out = None,
) -> None:
    """Put a server under load, any OpenAI-style one; write every request's times as raw JSON.

    labkit bench serve --model toy --workload chat --concurrency 1 --concurrency 8 --concurrency 32
    """
    strangers = sorted(set(peer or ()) - {"vllm"})
    if strangers:
        raise typer.BadParameter(f"there is no server of {strangers[0]!r} to compare with; there is vllm")
    if api not in ("completions", "chat"):
        raise typer.BadParameter(f"--api is {api!r}; it can be completions or chat")
    if out is not None and out.suffix != ".json":
        raise typer.BadParameter(f"--out is {str(out)!r}; it must end in .json, the CSV goes beside it")
    if url is not None and (peer or offline or engine):
        raise typer.BadParameter("--peer, --offline and --engine go with a server that is started here, without --url")
    options = engine_options(engine)
    arrivals = _arrivals(concurrency, rate, burst, replay)
    _need_aiohttp()
    from labkit.bench.commands import RECORDED, free_name
    from labkit.bench.load.record import Objective
    from labkit.bench.load.serve import Settings, measure
    from labkit.bench.load.summary_csv import write_serve
    from labkit.bench.load.tables import of_serve

    beside = bool(peer) + offline
    settings = Settings(
        model=model,
        url=url,
        key=key,
        api=api,
        workloads=tuple(dict.fromkeys(workload or ("http64",))),
        arrivals=arrivals,
        requests=requests,
        repeats=repeats,
        seed=seed,
        objective=Objective(ttft_ms, tpot_ms),
        vllm=bool(peer),
        offline=offline,
        ignore_eos=ignore_eos,
        prefix_caching=prefix_caching,
        device=options.get("device", "auto"),
        memory_share=SHARE_TOGETHER / (1 + beside) if beside else SHARE_ALONE,
        vocab_size=vocab_size,
        engine=options,
        processes=processes,
        command=("labkit", *sys.argv[1:]),
    )
    (out or RECORDED / "x").parent.mkdir(parents=True, exist_ok=True)  # now, not after minutes of measuring
    path = out

    def keep(record: ServeRecord) -> None:
        nonlocal path
        path = path or free_name(RECORDED, record)
        typer.echo(f"wrote {path} and {write_serve(record, path)}", err=True)

    record = measure(settings, lambda line: typer.echo(line, err=True), keep)
    assert path is not None
    typer.echo(of_serve(record, path.as_posix()))


def soak(
    model: Model = "toy",
    clients: Annotated[int, typer.Option(min=1, max=1024, help="At once.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="For how long.")] = 300.0,
    url: Url = None,
    key: Key = "dev-key",
    seed: Annotated[int, typer.Option(help="Of what the clients do.")] = 0,
    engine: Engine = None,
    out: Out = None,
) -> None:
    """Clients that leave, read slowly or send nonsense, among others: is any answer wrong, does anything pile up?

    labkit bench soak --model toy --clients 64 --seconds 300

    In 16 bits an answer may depend on who else is in its batch: add --engine batch_invariant=true.
    """
    if url is not None and engine:
        raise typer.BadParameter("--engine goes with a server that is started here, without --url")
    options = engine_options(engine)
    _need_aiohttp()
    from labkit.bench.commands import RECORDED, free_name
    from labkit.bench.load.soak import SoakSettings, run_soak
    from labkit.bench.load.tables import of_soak
    from labkit.bench.record import write_json

    (out or RECORDED / "x").parent.mkdir(parents=True, exist_ok=True)
    settings = SoakSettings(model, url, key, clients, seconds, seed, options, ("labkit", *sys.argv[1:]))
    record = run_soak(settings, lambda line: typer.echo(line, err=True))
    path = out or free_name(RECORDED, record)
    write_json(record, path)
    typer.echo(of_soak(record, path.as_posix()))
    typer.echo(f"wrote {path}", err=True)
    failed = [check.name for check in record.checks if not check.passed]
    if failed:
        raise LabkitError(f"the soak found: not so that {'; not so that '.join(failed)}")


def engine_options(texts: list[str] | None) -> dict[str, Any]:
    """FIELD=VALUE, each value as JSON or a word, as fields that the engine takes."""
    from labkit.bench.commands import one_option
    from labkit.config import EngineConfig

    options: dict[str, Any] = {}
    for text in texts or ():
        options |= one_option("--engine", text, EngineConfig())
    return options


def _arrivals(
    concurrency: list[int] | None, rate: list[float] | None, burst: int, replay: Path | None
) -> tuple[Arrival, ...]:
    """None at all: the workloads' own."""
    from labkit.bench.load.arrivals import Bursts, Closed, Poisson, read_recording

    if bool(concurrency) + bool(rate) + bool(replay) > 1:
        raise typer.BadParameter("--concurrency, --rate and --replay exclude one another")
    if burst > 1 and not rate:
        raise typer.BadParameter("--burst goes with --rate")
    if replay is not None:
        return (read_recording(replay),)
    closed = tuple(Closed(clients) for clients in dict.fromkeys(concurrency or ()))
    return closed + tuple(Bursts(r, burst) if burst > 1 else Poisson(r) for r in dict.fromkeys(rate or ()))


def _need_aiohttp() -> None:
    """Raises LabkitError that says how to get it."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise LabkitError(NEEDS) from error
