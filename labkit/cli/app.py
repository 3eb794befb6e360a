"""The commands put together, and how one is run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import labkit
from labkit.bench.commands import app as bench
from labkit.cli.chat import chat
from labkit.cli.doctor import doctor
from labkit.cli.errors import report
from labkit.cli.generate import generate
from labkit.cli.models import app as models
from labkit.cli.options import with_parameters
from labkit.cli.serve import serve

NAMES = {"help_option_names": ["-h", "--help"]}


@dataclass
class Session:
    """What holds for the whole command."""

    debug: bool = False


def run(args: list[str]) -> int:
    """Run one command; returns its exit status. KeyboardInterrupt and a broken stdout are the caller's."""
    session = Session()
    command = typer.main.get_command(build())
    try:
        with command.make_context("labkit", args, obj=session) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        raise
    except Exception as error:
        return report(error, session.debug)
    return 0


@functools.cache  # it adds to the sub-commands' own apps
def build() -> typer.Typer:
    app = typer.Typer(
        name="labkit",
        help="An LLM inference engine to read, and the lessons that build it.",
        epilog="First steps:\n\nlabkit doctor\n\nlabkit chat toy\n\nlabkit generate toy --prompt 'Once upon a time'",
        context_settings=NAMES,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for command in (generate, chat, serve, doctor):
        app.command(context_settings=NAMES)(command)
    app.add_typer(models, name="models", context_settings=NAMES)
    app.add_typer(bench, name="bench", no_args_is_help=False, context_settings=NAMES)
    _take_debug_everywhere(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"labkit {labkit.__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass


def _set_debug(context: typer.Context, value: bool) -> None:
    if value:
        context.find_root().obj.debug = True


def _take_debug_everywhere(app: typer.Typer) -> None:
    """`--debug` may stand before or after the command, so each command has it."""
    for command in [*app.registered_commands, app.registered_callback]:
        if command is not None and command.callback is not None:
            command.callback = _with_debug(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _take_debug_everywhere(group.typer_instance)


def _with_debug(function: Callable[..., Any]) -> Callable[..., Any]:
    option = typer.Option(
        "--debug",
        callback=_set_debug,
        is_eager=True,
        help="Show the traceback of an error.",
    )
    debug = inspect.Parameter(
        "debug",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, option],
    )
    own = list(inspect.signature(function, eval_str=True).parameters.values())

    @functools.wraps(function)
    def command(**values: Any) -> None:
        values.pop("debug")
        function(**values)

    return with_parameters(command, [*own, debug])
