"""An exercise: what the learner sees, what is right, and what learners really get wrong.

The solution *defines* what is right: a check runs it and the learner's function on the same cases. The wrong answers
explain: if the learner's function answers as one of them does, the learner gets that one's message.
"""

from __future__ import annotations

import html
import linecache
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


def rounded(answer: Any) -> Any:
    """Tensors as lists of numbers with five digits, which is what a check compares and a learner can read."""
    if hasattr(answer, "tolist"):
        return rounded(answer.tolist())
    if isinstance(answer, (list, tuple)):
        return [rounded(value) for value in answer]
    return float(f"{answer:.5g}") if isinstance(answer, float) else answer


@dataclass(frozen=True)
class Case:
    """One call of the learner's function. `run` must make everything it passes anew, for it is called many times."""

    text: str  # as the learner would write it
    run: Callable[[Callable[..., Any]], Any]


@dataclass(frozen=True)
class Wrong:
    """An answer that learners really give, and what to tell them."""

    name: str
    source: str
    message: str


@dataclass(frozen=True)
class Exercise:
    """See the module. `stub`, `solution` and each wrong answer define a function (or class) called `name`."""

    id: str
    title: str
    name: str
    difficulty: str  # easy, medium or hard
    stub: str
    hints: tuple[str, str, str]
    solution: str
    wrong: tuple[Wrong, ...]
    cases: Callable[[], Iterable[Case]]  # the smallest first

    def define(self, source: str) -> Callable[..., Any]:
        """The function that `source` defines, with torch, math and Triton at hand."""
        import torch

        from labkit.lab.programs import tl, triton

        filename = f"<exercise {self.id}: {abs(hash(source))}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        space: dict[str, Any] = {"torch": torch, "math": math, "triton": triton, "tl": tl}
        space["__name__"] = f"exercise_{self.id.replace('.', '_')}"
        exec(compile(source, filename, "exec"), space)
        return space[self.name]

    def lines(self) -> int:
        """How many the solution has that the stub does not give."""
        given = self.stub.splitlines()
        return sum(line not in given for line in self.solution.strip().splitlines())

    def hints_markdown(self) -> str:
        """The hints and the solution, each behind a click, for the cell under the stub."""
        parts = [
            f"<details><summary>Hint {number}</summary>\n\n{hint}\n\n</details>"
            for number, hint in enumerate(self.hints, start=1)
        ]
        parts.append(f"<details><summary>Solution</summary>\n\n```python\n{self.solution.strip()}\n```\n\n</details>")
        return "\n".join(parts)


@dataclass(frozen=True)
class Verdict:
    """What `lab.check` found. Its text is the same on every machine."""

    id: str
    title: str
    passed: bool | None  # None: not tried
    message: str
    facts: tuple[tuple[str, str], ...] = ()  # case, expected, got, difference

    @property
    def mark(self) -> str:
        return {None: "⏳", False: "❌", True: "✅"}[self.passed]

    def __repr__(self) -> str:
        lines = [f"{self.mark} {self.id} {self.title}: {self.message}"]
        return "\n".join(lines + [f"   {name:<11}{value}" for name, value in self.facts])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{name}</th>'
            f'<td style="text-align:left"><code>{html.escape(value)}</code></td></tr>'
            for name, value in self.facts
        )
        head = f"{self.mark} <b>{self.id} {html.escape(self.title)}</b>: {html.escape(self.message)}"
        return f'<div role="status">{head}</div>' + (f"<table>{rows}</table>" if rows else "")
