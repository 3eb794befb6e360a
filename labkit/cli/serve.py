"""`labkit serve`: the OpenAI-style server."""

from __future__ import annotations

from typing import Annotated

import typer

from labkit.cli.field_help import SERVER_HELP
from labkit.cli.groups import ENGINE, MODEL
from labkit.cli.options import FieldOptions, options
from labkit.config import EngineConfig
from labkit.server.config import ServerConfig

SERVER = FieldOptions(
    ServerConfig,
    SERVER_HELP,
    "Server (each also as LABKIT_… in the environment)",
    environment=True,
    spelling={"api_keys": "api_key", "cors_origins": "cors_origin"},
)


@options(server=SERVER, engine=ENGINE)
def serve(
    model: Annotated[str, MODEL] = "toy",
    *,
    server: ServerConfig,
    engine: EngineConfig,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it.

    labkit serve smollm2-135m --port 8000 --api-key my-key --max-model-len 2048
    """
    # LABKIT_ENVIRONMENT=production, which needs a key of one's own, is the server's to look at.
    from labkit.server.serve import run

    raise typer.Exit(run(model, engine, server))
