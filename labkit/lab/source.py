"""The engine's own code, read from the file that is running."""

from __future__ import annotations

import html
import inspect
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.style import Style
from pygments.token import Comment, Keyword, Name, Number, String

import labkit

ROOT = Path(labkit.__file__).resolve().parent.parent


class BothThemes(Style):
    """Mid-tones: they stand out from white and from near-black."""

    styles: ClassVar = {
        Comment: "italic #7d7d7d",
        Keyword: "bold #8c6bd1",
        Name.Builtin: "#2f86c4",
        Name.Function: "bold #2f86c4",
        Name.Class: "bold #2f86c4",
        Name.Decorator: "#8c6bd1",
        Number: "#b9770e",
        String: "#2a9261",
        String.Doc: "italic #7d7d7d",
    }


class Source:
    """A piece of code with the place it stands; folded, for pages where code is not the point."""

    def __init__(self, obj: Any, folded: bool = False):
        target = inspect.unwrap(obj) if callable(obj) else obj
        try:
            lines, first = inspect.getsourcelines(target)
            path = Path(inspect.getsourcefile(target) or "").resolve()
        except (TypeError, OSError) as error:
            raise ValueError(f"no source can be found for {obj!r}; give a function, class or module") from error
        first = max(first, 1)  # a module starts at "line 0"
        self.code = textwrap.dedent("".join(lines)).rstrip()
        self.path = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        self.first, self.last = first, first + len(lines) - 1
        self.folded = folded

    @property
    def title(self) -> str:
        return f"{self.path}, lines {self.first} to {self.last}"

    def __repr__(self) -> str:
        return f"# {self.title}\n{self.code}"

    def _repr_html_(self) -> str:
        return (
            f"<details{'' if self.folded else ' open'}><summary><code>{html.escape(self.title)}</code></summary>"
            f"{highlight(self.code)}</details>"
        )


def highlight(code: str) -> str:
    """HTML in colours that can be read on a light and on a dark page."""
    # Inline colours: a page that does not trust the notebook drops <style>.
    formatter = HtmlFormatter(noclasses=True, style=BothThemes, nobackground=True)
    return str(pygments.highlight(code, PythonLexer(), formatter))
