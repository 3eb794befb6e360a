"""Chat templates: a model's own Jinja text that turns messages into one prompt.

Templates come with the weights, from anybody, so they run in Jinja's sandbox and within the bounds of
`template_bounds`. The helpers are those that transformers gives its templates.
"""

from __future__ import annotations

import json
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
from labkit.models.template_bounds import MAX_CHARACTERS, Budget, bounded_arguments, bounded_filter, check_growth

MAX_SECONDS = 10.0


class ChatTemplate:
    """One template with the special tokens that it may write.

    Attributes:
        source: the Jinja text; None when the model brings none.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for these messages.

        Raises:
            RequestError: (param "messages") when there is no template, or it refuses these messages.
        """
        if self.source is None:
            raise RequestError("the model has no chat template; use a plain prompt (completions) instead", "messages")
        plain = [_plain_message(message) for message in messages]
        try:
            if self._compiled is None:
                self._compiled = _Environment().from_string(self.source)
            self._compiled.environment.budget = Budget(MAX_SECONDS)  # type: ignore[attr-defined]
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
                f"the model's chat template refuses these messages: {str(error) or type(error).__name__}",
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


class _Bounds(Extension):
    """Hooks that the rewritten template calls. An extension's methods are out of a template's reach."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """{% generation %} marks an answer for training; here its body is plain text."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tick(self, size: int) -> str:
        self.environment.budget.tick(size)  # type: ignore[attr-defined]
        return ""

    def made(self, value: Any) -> Any:
        return self.environment.budget.made(value)  # type: ignore[attr-defined]

    def concat(self, *parts: Any) -> Any:
        return self.made("".join(map(str, parts)))


class _Bounded(NodeTransformer):
    """Puts a tick at the start of each loop and macro body, and counts what slices, `~` and {{ }} make."""

    def __init__(self, bounds: _Bounds):
        self.bounds = bounds

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self.bounds.call_method("concat", list(node.nodes), lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._made(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, nodes.TemplateData) else self._made(part) for part in node.nodes]
        return node

    def _made(self, node: nodes.Expr) -> nodes.Expr:
        return self.bounds.call_method("made", [node], lineno=node.lineno)

    def _with_tick(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        size = nodes.Const(sum(len(text.data) for text in node.find_all(nodes.TemplateData)))
        tick = self.bounds.call_method("tick", [size], lineno=node.lineno)
        node.body.insert(0, nodes.Output([tick], lineno=node.lineno))
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' settings and helpers, and bounds. `range` is bounded by Jinja's sandbox (100,000)."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Bounds, loopcontrols])
        self.budget = Budget(MAX_SECONDS)
        self.filters["tojson"] = _tojson
        self.filters = {name: bounded_filter(name, each, lambda: self.budget) for name, each in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]  # filler text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        bounds = next(e for e in self.extensions.values() if isinstance(e, _Bounds))
        tree: nodes.Template = _Bounded(bounds).visit(super()._parse(source, name, filename))
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:
        # Jinja's names, so that a template's own keyword arguments never meet them.
        args = bounded_arguments(__obj, args, options)
        return __self.budget.made(super().call(__context, __obj, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make a large value out of small ones."""
        if operator == "**" and (abs(left) > 1000 or abs(right) > 100):
            raise OverflowError(f"{left} ** {right} is out of bounds")
        if operator == "%" and isinstance(left, str):
            check_growth("%", left, right if isinstance(right, tuple) else [right])
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                sized = isinstance(value, (str, list, tuple)) and isinstance(times, int)
                if sized and len(value) * times > MAX_CHARACTERS:
                    raise OverflowError(f"a value of more than {MAX_CHARACTERS} characters or entries")
        return self.budget.made(super().call_binop(context, operator, left, right))
