"""The groups of options that more than one command has."""

from __future__ import annotations

from typing import Annotated

import typer

from labkit.cli.field_help import ENGINE_HELP, SAMPLING_HELP
from labkit.cli.options import FieldOptions
from labkit.config import EngineConfig, SamplingParams

ENGINE = FieldOptions(
    EngineConfig,
    ENGINE_HELP,
    "Engine (each also as LABKIT_… in the environment)",
    environment=True,
)
# Where one request is the whole work, --seed is that request's.
ENGINE_OF_ONE_REQUEST = FieldOptions(ENGINE.config, ENGINE.help, ENGINE.title, environment=True, omit=("seed",))
SAMPLING = FieldOptions(SamplingParams, SAMPLING_HELP, "Sampling")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer and errors.")]
