"""`labkit bench`: the commands that measure, and the one that draws what was measured."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

# Everything heavy is imported inside the commands: `labkit --help` must not wait for torch.
if TYPE_CHECKING:
    from labkit.bench.kernels import KernelRecord
    from labkit.bench.record import Record
    from labkit.config import EngineConfig

app = typer.Typer(help="Measure the engine, and draw what was measured.", no_args_is_help=True)

RECORDED = Path("data/recorded")


@app.command()
def offline(
    model: Annotated[str, typer.Option(help="toy, smollm2-135m, a folder, a .gguf file or a hub id.")] = "smollm2-135m",
    workload: Annotated[
        list[str] | None, typer.Option(help="decode1, decode8, prefill512, nano256, b1, b8 or b64; may be repeated.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Run transformers and llama.cpp in turn with us.")] = False,
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
    prefix_caching: Annotated[bool, typer.Option(help="Every repeat sends the same prompts: off is honest.")] = False,
) -> None:
    """Measure throughput, first token, memory and the cost of a step; write raw JSON and a CSV summary.

    labkit bench offline --model smollm2-135m --peers
    """
    from labkit.bench.workloads import WORKLOADS

    unknown = sorted(set(workload or ()) - set(WORKLOADS))
    if unknown:
        raise typer.BadParameter(f"there is no workload {unknown[0]!r}; known ones: {', '.join(WORKLOADS)}")
    if out is not None and out.suffix != ".json":
        raise typer.BadParameter(f"--out is {str(out)!r}; it must end in .json, the CSV goes beside it")
    engine = _engine_config(
        device=device,
        dtype=dtype,
        kernels=kernels,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=num_kv_blocks,
        enable_prefix_caching=prefix_caching,
    )
    import torch

    from labkit.bench.offline import Settings, measure
    from labkit.bench.record import write_record
    from labkit.bench.table import markdown

    (out or RECORDED / "x").parent.mkdir(parents=True, exist_ok=True)  # now, not after minutes of measuring
    if threads is not None:
        torch.set_num_threads(threads)
    command = ("labkit", *sys.argv[1:])
    settings = Settings(model, tuple(workload or ()), peers, repeats, engine, trace, command)
    record = measure(settings, lambda line: typer.echo(line, err=True))
    path = out or _free_name(RECORDED, record)
    table = write_record(record, path)
    typer.echo(markdown(record, path.as_posix()))
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

    record = measure(torch.device(device), ["labkit", *sys.argv[1:]], typer.echo)
    path = out or _free_name(RECORDED, record)
    write_json(record, path)
    typer.echo(f"wrote {path}", err=True)


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="A trace (.jsonl) or a record (.json).")],
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="A trace: write JSON for ui.perfetto.dev instead.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="A record: print its table, draw nothing.")] = False,
) -> None:
    """Draw a trace as a timeline, or a record as bars, into a PNG beside the file.

    labkit bench plot trace.jsonl
    """
    from labkit.bench.plots import draw_record, draw_timeline, read_trace, write_perfetto
    from labkit.bench.record import read_record
    from labkit.bench.table import markdown

    is_trace = file.suffix == ".jsonl"
    if perfetto and not is_trace:
        raise typer.BadParameter("--perfetto is for a trace, a .jsonl file")
    if as_markdown and is_trace:
        raise typer.BadParameter("--markdown is for a record, a .json file")
    if as_markdown:
        typer.echo(markdown(read_record(file), file.as_posix()))
    elif perfetto:
        typer.echo(f"wrote {write_perfetto(read_trace(file), file.with_suffix('.perfetto.json'))}")
    elif is_trace:
        typer.echo(f"wrote {draw_timeline(read_trace(file), file.with_suffix('.png'))}")
    else:
        record = read_record(file)
        typer.echo(markdown(record, file.as_posix()))
        typer.echo(f"wrote {draw_record(record, file.with_suffix('.bars.png'))}", err=True)


def _engine_config(**fields: object) -> EngineConfig:
    from labkit.config import EngineConfig

    try:
        return EngineConfig(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _free_name(folder: Path, record: Record | KernelRecord) -> Path:
    """data/recorded/cpu-offline-2026-11-30.json; raw results are never overwritten, so a second one gets -2."""
    gpus = record.machine.gpus if record.device.startswith("cuda") else []
    kind = gpus[0].name.removeprefix("NVIDIA ").split()[0].lower() if gpus else "cpu"
    stem = f"{kind}-{record.kind}-{datetime.date.fromisoformat(record.date[:10])}"
    names = (f"{stem}.json" if n == 1 else f"{stem}-{n}.json" for n in range(1, 1000))
    return next(folder / name for name in names if not (folder / name).exists())
