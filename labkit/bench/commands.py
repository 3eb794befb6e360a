"""`labkit bench`: the commands that measure, and the one that draws what was measured.

Those that put a server under load are in `load/commands.py`.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.bench.load.commands import serve, soak

# Everything heavy is imported inside the commands: `labkit --help` must not wait for torch.
if TYPE_CHECKING:
    from labkit.bench.table import AnyRecord
    from labkit.config import EngineConfig

app = typer.Typer(help="Measure the engine, and draw what was measured.", no_args_is_help=True)
app.command()(serve)
app.command()(soak)

RECORDED = Path("data/recorded")
SHARE_ALONE, SHARE_TOGETHER = 0.9, 0.8  # of the GPU's memory: for our engine, for it and those beside it


@app.command()
def offline(
    model: Annotated[str, typer.Option(help="toy, smollm2-135m, a folder, a .gguf file or a hub id.")] = "toy",
    workload: Annotated[
        list[str] | None,
        typer.Option(help="decode1, decode8, prefill512, nano256, b1, b8, b64 or prefill32x2048; may be repeated."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Runs in turn with us: transformers, llama.cpp or vllm; may be repeated.")
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Our engine with one option changed runs in turn with us: batch_invariant=true; may be repeated."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The JSON to write; the CSV goes beside it.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each engine on each workload.")] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads, for every engine.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Also write our engine's trace here (slows it a little).")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, torch, triton or cuda.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="As short as the workloads allow unless given.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.")] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="On a CPU, as few as needed unless given.")] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Share of the GPU that each engine gets: 0.9, beside another one 0.4, unless given."),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Every repeat sends the same prompts: off is honest.")] = False,
) -> None:
    """Measure throughput, first token, memory and the cost of a step; write raw JSON and a CSV summary.

    labkit bench offline --model smollm2-135m --peer transformers --peer llama.cpp
    """
    from labkit.bench.peers import PEERS
    from labkit.bench.workloads import WORKLOADS

    unknown = sorted(set(workload or ()) - set(WORKLOADS))
    if unknown:
        raise typer.BadParameter(f"there is no workload {unknown[0]!r}; known ones: {', '.join(WORKLOADS)}")
    strangers = sorted(set(peer or ()) - set(PEERS))
    if strangers:
        raise typer.BadParameter(f"there is no peer {strangers[0]!r}; known ones: {', '.join(PEERS)}")
    if out is not None and out.suffix != ".json":
        raise typer.BadParameter(f"--out is {str(out)!r}; it must end in .json, the CSV goes beside it")
    beside = len(variant or ()) + bool(peer)
    share = SHARE_TOGETHER / (1 + beside) if beside else SHARE_ALONE
    engine = _engine_config(
        device=device,
        dtype=dtype,
        kernels=kernels,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=num_kv_blocks,
        gpu_memory_utilization=gpu_memory_utilization if gpu_memory_utilization is not None else share,
        enable_prefix_caching=prefix_caching,
    )
    import torch

    from labkit.bench.offline import Settings, measure
    from labkit.bench.record import write_record
    from labkit.bench.table import of_offline

    (out or RECORDED / "x").parent.mkdir(parents=True, exist_ok=True)  # now, not after minutes of measuring
    if threads is not None:
        torch.set_num_threads(threads)
    command = ("labkit", *sys.argv[1:])
    variants = {text: one_option("--variant", text, engine) for text in variant or ()}
    settings = Settings(model, tuple(workload or ()), tuple(peer or ()), repeats, engine, variants, trace, command)
    record = measure(settings, lambda line: typer.echo(line, err=True))
    path = out or free_name(RECORDED, record)
    table = write_record(record, path)
    typer.echo(of_offline(record, path.as_posix()))
    typer.echo(f"wrote {path} and {table}", err=True)


@app.command()
def kernels(
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
) -> None:
    """Measure every operation of a step on a GPU, beside PyTorch's and beside a copy's bandwidth; write raw JSON."""
    import torch

    from labkit.bench.kernels import measure
    from labkit.bench.record import write_json
    from labkit.bench.table import of_kernels

    record = measure(torch.device(device), ["labkit", *sys.argv[1:]], lambda line: typer.echo(line, err=True))
    path = out or free_name(RECORDED, record)
    write_json(record, path)
    typer.echo(of_kernels(record, path.as_posix()))
    typer.echo(f"wrote {path}", err=True)


@app.command()
def profile(
    model: Annotated[str, typer.Option(help="toy, smollm2-135m, a folder, a .gguf file or a hub id.")] = "toy",
    workload: Annotated[str, typer.Option(help="decode1, decode8, nano256, b1, b8 or b64.")] = "b1",
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N.")] = "cuda",
    kernels: Annotated[str, typer.Option(help="auto, torch, triton or cuda.")] = "auto",
) -> None:
    """Where a workload's decode step goes on a GPU: its kernels, summed by name, and the gaps; write raw JSON."""
    engine = _engine_config(device=device, kernels=kernels, enable_prefix_caching=False)
    from labkit.bench.profile import measure
    from labkit.bench.record import write_json
    from labkit.bench.table import of_profile

    record = measure(model, workload, engine, ["labkit", *sys.argv[1:]])
    path = out or free_name(RECORDED, record)
    write_json(record, path)
    typer.echo(of_profile(record, path.as_posix()))
    typer.echo(f"wrote {path}", err=True)


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Traces (.jsonl) or records (.json).", metavar="FILE...")],
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Traces: write JSON for ui.perfetto.dev instead.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Records: print their tables, draw nothing.")] = False,
    into: Annotated[
        Path | None, typer.Option(help="With --markdown: write the tables between the `measured` marks of this page.")
    ] = None,
) -> None:
    """Draw traces as timelines, records of `bench offline` as bars, of `bench serve` as curves: a PNG beside each file.

    labkit bench plot trace.jsonl
    """
    traces = [file for file in files if file.suffix == ".jsonl"]
    if perfetto and len(traces) < len(files):
        raise typer.BadParameter("--perfetto is for a trace, a .jsonl file")
    if as_markdown and traces:
        raise typer.BadParameter("--markdown is for a record, a .json file")
    if into is not None and not as_markdown:
        raise typer.BadParameter("--into goes with --markdown")
    if into is not None:
        from labkit.bench.reading import tables, write_block

        write_block(into, tables(files))
        typer.echo(f"wrote {into}")
        return
    for file in files:
        _plot(file, perfetto, as_markdown)


def _plot(file: Path, perfetto: bool, as_markdown: bool) -> None:
    from labkit.bench.load.plots import draw_load
    from labkit.bench.load.record import ServeRecord
    from labkit.bench.plots import draw_record, draw_timeline, read_trace, write_perfetto
    from labkit.bench.reading import markdown, read_record
    from labkit.bench.record import Record

    if perfetto:
        typer.echo(f"wrote {write_perfetto(read_trace(file), file.with_suffix('.perfetto.json'))}")
    elif file.suffix == ".jsonl":
        typer.echo(f"wrote {draw_timeline(read_trace(file), file.with_suffix('.png'))}")
    else:
        record = read_record(file)
        typer.echo(markdown(file))
        if not as_markdown and isinstance(record, Record):
            typer.echo(f"wrote {draw_record(record, file.with_suffix('.bars.png'))}", err=True)
        if not as_markdown and isinstance(record, ServeRecord):
            typer.echo(f"wrote {draw_load(record, file.with_suffix('.load.png'))}", err=True)


def _engine_config(**fields: object) -> EngineConfig:
    from labkit.config import EngineConfig

    try:
        return EngineConfig(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def one_option(flag: str, text: str, engine: EngineConfig) -> dict[str, object]:
    """FIELD=VALUE, the value as JSON or a word: {"FIELD": value}, if the engine takes it."""
    import msgspec

    name, separator, value = text.partition("=")
    if not separator or name not in vars(engine):
        raise typer.BadParameter(f"{flag} is {text!r}; it is FIELD=VALUE with one of {', '.join(vars(engine))}")
    try:
        options = {name: msgspec.json.decode(value)}
    except msgspec.DecodeError:
        options = {name: value}
    try:
        engine.replace(**options)
    except ValueError as error:
        raise typer.BadParameter(f"{flag} {text}: {error}") from error
    return options


def free_name(folder: Path, record: AnyRecord) -> Path:
    """data/recorded/cpu-offline-2026-11-30.json; raw results are never overwritten, so a second one gets -2."""
    gpus = record.machine.gpus if record.device.startswith("cuda") else []
    kind = gpus[0].name.removeprefix("NVIDIA ").split()[0].lower() if gpus else "cpu"
    stem = f"{kind}-{record.kind}-{datetime.date.fromisoformat(record.date[:10])}"
    names = (f"{stem}.json" if n == 1 else f"{stem}-{n}.json" for n in range(1, 1000))
    return next(folder / name for name in names if not (folder / name).exists())
