"""`labkit models`: which models there are, fetch one, look at one."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from labkit.cli.errors import value_errors_are_wrong_arguments
from labkit.cli.groups import ENGINE, MODEL
from labkit.cli.options import options
from labkit.config import EngineConfig, RopeConfig
from labkit.errors import counted

app = typer.Typer(help="Known models: list them, fetch one, look at one.")


@app.command("list")
def list_models() -> None:
    """The models that have a name here, and where each one lies."""
    from labkit.models.sources import known_models

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Model", no_wrap=True, style="bold")
    table.add_column("What it is")
    table.add_column("Where it lies", overflow="fold")
    for model in known_models():
        table.add_row(model.name, model.description, f"{model.path or 'not here yet'}\n({model.source})")
    # Without a terminal, whoever reads it wants each path in one piece.
    Console(width=None if sys.stdout.isatty() else 500, highlight=False, markup=False).print(table)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name from `labkit models list`, or a hub id.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Fetch a model into the cache folder (LABKIT_CACHE), and print where it lies.

    labkit models pull smollm2-135m
    """
    from labkit.models.sources import pull as fetch

    print(fetch(name, progress=not quiet))


@app.command()
@options(engine=ENGINE)
def inspect(
    name: Annotated[str, MODEL],
    *,
    engine: EngineConfig,
) -> None:
    """A model's config, its exact number of parameters and the memory it would take here."""
    from labkit.kernels.backend import resolve_device, resolve_dtype
    from labkit.models.checkpoint import open_checkpoint
    from labkit.models.memory import plan_memory

    checkpoint = open_checkpoint(name)
    device = resolve_device(engine.device)
    dtype = resolve_dtype(engine.dtype, device)
    print(f"{checkpoint.name}  {checkpoint.path}\n")
    print_fields(vars(checkpoint.config))
    print(f"\n{checkpoint.num_parameters:,} parameters\n")
    with value_errors_are_wrong_arguments():
        print(plan_memory(checkpoint.config, engine, device, dtype))


def print_fields(fields: dict[str, Any]) -> None:
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        print(f"{name:{width}}  {_in_words(name, value)}")


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, RopeConfig):
        return _rope(value)
    if name == "sliding_windows":
        return _windows(value)
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def _rope(rope: RopeConfig) -> str:
    """The type, theta, and what differs from the defaults: "llama3, theta 500000, factor 8"."""
    words = [rope.rope_type, f"theta {rope.theta:g}"]
    for field in dataclasses.fields(rope):
        value = getattr(rope, field.name)
        if field.name not in ("rope_type", "theta") and value != field.default:
            words.append(f"{field.name} {value:g}" if isinstance(value, float) else f"{field.name} {value}")
    return ", ".join(words)


def _windows(windows: tuple[int | None, ...]) -> str:
    """Runs of layers with the same window: "layers 0 to 3: none; layers 4 to 7: 20 tokens"."""
    said, start = [], 0
    for window, run in itertools.groupby(windows):
        end = start + len(list(run))
        which = f"layer {start}" if end == start + 1 else f"layers {start} to {end - 1}"
        said.append((which, "none" if window is None else counted(window, "token")))
        start = end
    return said[0][1] if len(said) == 1 else "; ".join(f"{which}: {window}" for which, window in said)
