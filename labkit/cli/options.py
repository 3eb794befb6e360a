"""Options made from the fields of a dataclass, so that no option is listed twice.

A command takes the dataclass as one keyword argument; `options` replaces that argument by one option a field:

    @options(engine=FieldOptions(EngineConfig, ENGINE_HELP, environment=True))
    def command(model: str, *, engine: EngineConfig) -> None: ...

    labkit command toy --max-num-seqs 8          or LABKIT_MAX_NUM_SEQS=8 labkit command toy
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from labkit.cli.errors import WrongArguments, value_errors_are_wrong_arguments


@dataclass(frozen=True)
class FieldOptions:
    """Which fields of a dataclass become options.

    Attributes:
        config: the dataclass; its __post_init__ raises ValueError for a wrong value.
        help: one line for each field.
        title: heading of these options in `--help`.
        environment: each option may also come from LABKIT_FIELD.
        only, omit: names of the fields that are taken, or left out.
        defaults: where the command's default is another than the field's.
        spelling: fields whose option has another name: one --api-key at a time, for the field api_keys.
    """

    config: type
    help: Mapping[str, str]
    title: str
    environment: bool = False
    only: Collection[str] = ()
    omit: Collection[str] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spelling: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def _field(self, name: str) -> dataclasses.Field[Any]:
        return next(field for field in dataclasses.fields(self.config) if field.name == name)

    def _variable(self, name: str) -> str | None:
        return f"LABKIT_{self.spelling.get(name, name).upper()}" if self.environment else None

    def names(self) -> list[str]:
        fields = [f.name for f in dataclasses.fields(self.config)]
        return [name for name in fields if name not in self.omit and (not self.only or name in self.only)]

    def parameters(self) -> list[inspect.Parameter]:
        types_ = typing.get_type_hints(self.config)
        return [self._parameter(name, types_[name]) for name in self.names()]

    def _parameter(self, name: str, hint: Any) -> inspect.Parameter:
        spelled = self.spelling.get(name, name)
        kebab = spelled.replace("_", "-")
        kind = option_type(hint)
        option = typer.Option(
            f"--{kebab}/--no-{kebab}" if kind is bool else f"--{kebab}",
            help=self.help[name],
            envvar=self._variable(name),
            show_envvar=False,
            metavar="JSON" if is_mapping(hint) else None,
            rich_help_panel=self.title,
        )
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self._default(name),
            annotation=Annotated[kind, option],
        )

    def _default(self, name: str) -> Any:
        default = self.defaults.get(name, self._field(name).default)
        return list(default) if isinstance(default, tuple) else default

    def build(self, values: Mapping[str, Any]) -> Any:
        """The dataclass made of the options' values. Raises WrongArguments with what the dataclass says."""
        hints = typing.get_type_hints(self.config)
        with value_errors_are_wrong_arguments():
            return self.config(**{name: self._field_value(name, hints[name], value) for name, value in values.items()})

    def _field_value(self, name: str, hint: Any, value: Any) -> Any:
        if is_mapping(hint) and value is not None:
            return _json_object(name, value)
        if isinstance(value, list):
            if value == os.environ.get(self._variable(name) or "", "").split():
                # A variable holds several, separated by commas or spaces; an option has one.
                value = [part for text in value for part in text.replace(",", " ").split()]
            return tuple(value) or self._field(name).default
        return value


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise WrongArguments(f"{name} is {text!r}, which is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WrongArguments(f"{name} is {text!r}; it must be a JSON object such as {{...}}")
    return value


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(_without_none(hint))
    return isinstance(origin, type) and issubclass(origin, Mapping)


def option_type(hint: Any) -> Any:
    """The type that typer is told: a mapping comes as JSON text, a tuple or list as an option to repeat."""
    inner = _without_none(hint)
    if is_mapping(inner):
        return str | None
    if typing.get_origin(inner) in (tuple, list):
        return list[typing.get_args(inner)[0]] | None  # type: ignore[misc]
    return inner if inner is hint else inner | None


def options(
    **groups: FieldOptions,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each keyword argument named in `groups` by the options of its dataclass."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name not in groups]
        made = [parameter for group in groups.values() for parameter in group.parameters()]

        @functools.wraps(function)
        def command(**values: Any) -> None:
            built = {
                name: group.build({field: values.pop(field) for field in group.names()})
                for name, group in groups.items()
            }
            function(**values, **built)

        return with_parameters(command, own + made)

    return decorate


def with_parameters(function: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """Show typer these parameters instead of the function's own."""
    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    function.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in keyword_only}
    return function
