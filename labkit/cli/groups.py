"""What more than one command has: groups of options, and the engine that they ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.errors import value_errors_are_wrong_arguments
from labkit.cli.field_help import ENGINE_HELP, SAMPLING_HELP
from labkit.cli.options import FieldOptions
from labkit.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from labkit.llm import LLM

ENGINE = FieldOptions(
    EngineConfig,
    ENGINE_HELP,
    "Engine (each also as LABKIT_… in the environment)",
    environment=True,
)
# Where one request is the whole work, --seed is that request's.
ENGINE_OF_ONE_REQUEST = FieldOptions(ENGINE.config, ENGINE.help, ENGINE.title, environment=True, omit=("seed",))
SAMPLING = FieldOptions(SamplingParams, SAMPLING_HELP, "Sampling")

MODEL = typer.Argument(help="toy, smollm2-135m, a folder, a .gguf file or a hub id.")
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer and errors.")]


def open_llm(model: str, engine: EngineConfig, quiet: bool) -> LLM:
    """The engine that the options ask for. Importing it brings torch, which takes seconds."""
    from labkit.llm import LLM

    with value_errors_are_wrong_arguments():  # such as a max_model_len that this model does not have
        return LLM(model, quiet=quiet, **vars(engine))
