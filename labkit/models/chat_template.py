"""Chat templates: a model's own Jinja text that turns messages into one prompt.

Templates come with the weights, from anybody, so they run in Jinja's sandbox and within bounds: loops by a
deadline, sizes by a limit. The helpers are those that transformers gives its templates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from labkit.errors import RequestError

MAX_CHARACTERS = 1 << 25  # of the prompt, and of any string or list that the template makes
MAX_SECONDS = 10.0


class ChatTemplate:
    """One template with the special tokens that it may write.

    Attributes:
        source: the Jinja text; None when the model brings none.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], where: str):
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for these messages.

        Raises:
            RequestError: (param "messages") when there is no template, or it refuses these messages.
        """
        if self.source is None:
            raise RequestError(
                f"{self._where} has no chat template; use a plain prompt (completions) instead", "messages"
            )
        plain = [_plain_message(message) for message in messages]
        try:
            if self._compiled is None:
                self._compiled = _Environment().from_string(self.source)
            _Environment.start_clock(self._compiled.environment)
            pieces, length = [], 0
            for piece in self._compiled.generate(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise OverflowError(f"the prompt has more than {MAX_CHARACTERS} characters")
                pieces.append(piece)
        except Exception as error:  # whatever goes wrong in a template is Python's to choose
            raise RequestError(
                f"the chat template of {self._where} refuses these messages: {str(error) or type(error).__name__}",
                "messages",
            ) from error
        return "".join(pieces)


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without null fields (as transformers does), and with text parts joined by newlines."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, (list, tuple)):
        texts = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
                raise RequestError("messages: content is a string or a list of text parts", "messages")
            texts.append(text)
        plain["content"] = "\n".join(texts)
    return plain


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _checked_size(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARACTERS:
        raise OverflowError(f"a value of more than {MAX_CHARACTERS} characters or entries")
    return value


class _Bounds(Extension):
    """Hooks that the rewritten template calls. An extension's methods are out of a template's reach."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """{% generation %} marks an answer for training; here its body is plain text."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self) -> str:
        if time.monotonic() > self.environment.deadline:  # type: ignore[attr-defined]
            raise TimeoutError(f"it runs for more than {MAX_SECONDS:.0f} seconds")
        return ""

    def concat(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > MAX_CHARACTERS:
            raise OverflowError(f"a text of more than {MAX_CHARACTERS} characters")
        return "".join(texts)


class _Bounded(NodeTransformer):
    """Puts a tick at the start of each loop and macro body, and a limit on `~`."""

    def __init__(self, bounds: _Bounds):
        self.bounds = bounds

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._tick(node))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._tick(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self.bounds.call_method("concat", list(node.nodes), lineno=node.lineno)

    def _tick(self, node: nodes.Node) -> nodes.Node:
        return nodes.Output([self.bounds.call_method("tick", lineno=node.lineno)], lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' settings and helpers, and bounds. `range` is bounded by Jinja's sandbox (100,000)."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Bounds, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.deadline = 0.0

    @staticmethod
    def start_clock(environment: jinja2.Environment) -> None:
        environment.deadline = time.monotonic() + MAX_SECONDS  # type: ignore[attr-defined]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        bounds = next(e for e in self.extensions.values() if isinstance(e, _Bounds))
        tree: nodes.Template = _Bounded(bounds).visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make a large value out of small ones."""
        if operator == "**" and (abs(left) > 1000 or abs(right) > 100):
            raise OverflowError(f"{left} ** {right} is out of bounds")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                sized = isinstance(value, (str, list, tuple)) and isinstance(times, int)
                if sized and len(value) * times > MAX_CHARACTERS:
                    raise OverflowError(f"a value of more than {MAX_CHARACTERS} characters or entries")
        return _checked_size(super().call_binop(context, operator, left, right))
