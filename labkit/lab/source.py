"""The engine's own code, read from the file that is running."""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer, PythonLexer
from pygments.style import Style
from pygments.token import Comment, Keyword, Name, Number, String

import labkit
from labkit.paths import shipped

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
        """`obj`: a function, class, module or kernel; or in words, "rms_norm.cpp:normalise" for a function of csrc/."""
        if isinstance(obj, str):
            lines, first, path = _in_csrc(obj)
        else:
            lines, first, path = _in_python(obj)
        self.cpp = isinstance(obj, str)
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
            f"{highlight(self.code, self.cpp)}</details>"
        )


def _in_python(obj: Any) -> tuple[list[str], int, Path]:
    """Lines, number of the first one, file."""
    target = inspect.unwrap(obj) if callable(obj) else obj
    if type(target).__module__.startswith("triton."):
        target = target.fn  # the function that the kernel is made of
    try:
        lines, first = inspect.getsourcelines(target)
        path = Path(inspect.getsourcefile(target) or "").resolve()
    except (TypeError, OSError) as error:
        raise ValueError(f"no source can be found for {obj!r}; give a function, class or module") from error
    return lines, max(first, 1), path  # a module starts at "line 0"


def _in_csrc(name: str) -> tuple[list[str], int, Path]:
    """The same for a C++ or CUDA function that ends with a brace in the first column, with the lines right above it."""
    file, _, function = name.partition(":")
    path = (shipped("csrc") or ROOT / "csrc") / file
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    head = re.compile(rf"(?!//)\S.*\b{re.escape(function)}\(")
    start = next((n for n, line in enumerate(lines) if function and head.match(line)), None)
    if start is None:
        raise ValueError(f"no source can be found for {name!r}; give a file of csrc/ and a function, as in 'a.cpp:dot'")
    end = next(n for n in range(start, len(lines)) if lines[n].rstrip() == "}")
    while lines[start - 1].strip():
        start -= 1
    return lines[start : end + 1], start + 1, path.resolve()


def highlight(code: str, cpp: bool = False) -> str:
    """HTML in colours that can be read on a light and on a dark page."""
    # Inline colours: a page that does not trust the notebook drops <style>.
    formatter = HtmlFormatter(noclasses=True, style=BothThemes, nobackground=True)
    return str(pygments.highlight(code, CudaLexer() if cpp else PythonLexer(), formatter))
