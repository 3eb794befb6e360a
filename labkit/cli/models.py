"""`labkit models`: which models there are, fetch one, look at one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from labkit.cli.errors import value_errors_are_wrong_arguments
from labkit.cli.groups import ENGINE, MODEL
from labkit.cli.options import options
from labkit.config import EngineConfig

app = typer.Typer(help="Known models: list them, fetch one, look at one.")


@app.command("list")
def list_models() -> None:
    """The models that have a name here, and where each one lies."""
    from labkit.models.sources import known_models

    models = known_models()
    width = max(len(model.name) for model in models)
    for model in models:
        print(f"{model.name:{width}}  {model.description}")
        print(f"{'':{width}}  {model.path or 'not here yet'} ({model.source})")


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
        print(f"{name:{width}}  {_readable(value)}")


def _readable(value: Any) -> str:
    """Long runs of one value (the window of each layer) in a word."""
    if isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1:
        return f"{value[0]} ({len(value)} times)"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)
