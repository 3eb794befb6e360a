"""Exceptions to exit statuses, and to the one line that a user reads."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import typer

from labkit.errors import LabkitError, RequestError

FAILED = 1
WRONG_ARGUMENTS = 2


class WrongArguments(Exception):
    """The options are wrong in a way that only a look at all of them shows."""


@contextlib.contextmanager
def value_errors_are_wrong_arguments() -> Iterator[None]:
    """Around what takes the options' values, and raises ValueError for one that is not allowed."""
    try:
        yield
    except ValueError as error:
        raise WrongArguments(str(error)) from error


def is_usage_error(error: BaseException) -> bool:
    """True for what typer raises while it reads the arguments (its class has moved between versions)."""
    return hasattr(error, "format_message") and getattr(error, "exit_code", None) == WRONG_ARGUMENTS


def exit_status(error: Exception) -> int:
    wrong = is_usage_error(error) or isinstance(error, (WrongArguments, RequestError))
    return WRONG_ARGUMENTS if wrong else FAILED


def describe(error: Any) -> str:
    """What went wrong, in one line."""
    if is_usage_error(error):
        text = _describe_usage(error)
    elif isinstance(error, (LabkitError, WrongArguments, ValueError)):
        text = str(error)
    elif isinstance(error, OSError):
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        text = f"{type(error).__name__}: {error} (--debug shows where)"
    return " ".join(text.split())


def _describe_usage(error: Any) -> str:
    """typer's message, with the commands that there are and where to read on."""
    text = error.format_message().rstrip(".") + "."
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    parameter = getattr(error, "param", None)
    if parameter is not None and getattr(context.get_parameter_source(parameter.name), "name", "") == "ENVIRONMENT":
        text += f" It comes from {parameter.envvar} in the environment."
    commands = getattr(context.command, "commands", None)
    if commands:
        text += f" Commands: {', '.join(commands)}."
    return f"{text} See: {context.command_path} --help"


def report(error: Exception, debug: bool) -> int:
    """Tell the user; returns the exit status."""
    if debug:
        traceback.print_exception(error)
    print(f"labkit: error: {describe(error)}", file=sys.stderr)
    return exit_status(error)


def note(text: str) -> None:
    """Something to know that is no result."""
    typer.echo(text, err=True)
