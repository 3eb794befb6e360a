"""The exceptions that users see. Each message says what was wrong, what is allowed and what to do."""

from __future__ import annotations


class LabkitError(Exception):
    """The work could not be done: the base of everything that is not a plain ValueError."""


class ModelError(LabkitError):
    """A model cannot be found, read or held in memory. The message names the file and the field."""


class KernelError(LabkitError):
    """A kernel backend was asked for that this machine, shape or dtype cannot run."""


class EngineClosedError(LabkitError):
    """The engine was closed; make a new LLM."""


class EngineStepError(LabkitError):
    """A step failed. Only the requests of that step are lost; the engine goes on."""


class RequestError(ValueError):
    """A request that cannot be run, refused before it disturbs any other.

    Attributes:
        param: the field that is wrong, as an OpenAI client would name it.
        code: the OpenAI error code, ``invalid_value`` or ``context_length_exceeded``.
    """

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


def counted(number: int, noun: str) -> str:
    """1 -> "1 token", 2000 -> "2,000 tokens": for messages."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
