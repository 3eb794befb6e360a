"""What one rendering of a chat template may spend: seconds and bytes.

A template comes from anybody. A few characters of it can ask for a loop without end or a text of gigabytes, so what
can grow is looked at: before, where one operation alone can make something huge of little; afterwards, where results
add up. Whatever was made counts, whether it was kept or not.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

MAX_CHARACTERS = 1 << 25  # of the prompt, and of any string or list that the template makes
MAX_BYTES = 1 << 30  # of all that it makes
MAX_BITS = 1 << 16  # of a whole number; larger ones take long to multiply
ENTRY_BYTES = 64  # about what a short string in a list takes

# What can make a long text out of a short one. The others give no more than they get.
GROWING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "format", "format_map"}
GROWING_METHODS |= {"translate"}
GROWING_FILTERS = {"center", "indent", "replace", "join", "format", "wordwrap", "batch", "slice", "tojson", "urlize"}


class Budget:
    """Of one rendering: the deadline, and the bytes that are left."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._left = MAX_BYTES

    def tick(self, size: int) -> None:
        """A round of a loop, or a call of a macro, with so many characters of plain text in it."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it runs for more than {self._seconds:.0f} seconds")
        self._spend(size)

    def made(self, value: Any) -> Any:
        """A value that an operation gave."""
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise OverflowError("a number is out of bounds")
        elif isinstance(value, (str, bytes, list, tuple, dict, set)):
            if len(value) > MAX_CHARACTERS:
                raise OverflowError(f"a value of more than {MAX_CHARACTERS} characters or entries")
            self._spend(sys.getsizeof(value) + (0 if isinstance(value, (str, bytes)) else ENTRY_BYTES * len(value)))
        return value

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise OverflowError(f"it makes more than {MAX_BYTES >> 20} MiB of text")


def check_growth(name: str, subject: Any, args: Iterable[Any]) -> None:
    """Before a method, filter or operator of GROWING_…: an upper bound for the length of what it makes.

    Raises:
        OverflowError: it may be more than is allowed.
    """
    args = list(args)
    length = _length(subject)
    if name == "replace" and len(args) >= 2 and isinstance(subject, str) and isinstance(args[0], str):
        size = length + subject.count(args[0]) * _length(args[1])
    elif name in ("format", "format_map", "%"):
        widths = [int(digits[:9]) for digits in re.findall(r"\d+", subject)] if isinstance(subject, str) else []
        size = length * max(1, *widths, *map(_factor, args))
    elif name == "join":  # the filter's subject is the list, the method's the separator
        lengths = [_length(part) for part in (subject, *args)]
        size = (1 + lengths[0]) * (1 + max(lengths[1:], default=0))
    else:
        size = (1 + length) * max(1, *map(_factor, args), 1)
    if size > MAX_BYTES:
        raise OverflowError(f"{name} may give a value of more than {MAX_CHARACTERS} characters")


def _factor(value: Any) -> int:
    """How many characters an argument can make of one: a width, or a text's own length."""
    return abs(value) if isinstance(value, int) else _length(value)


def _length(value: Any) -> int:
    """Of a text; of a list, that of all texts in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 20  # a number's, or so
    return sum(len(item) if isinstance(item, str) else 20 for item in value)


def bounded_filter(name: str, filter: Callable[..., Any], budget: Callable[[], Budget]) -> Callable[..., Any]:
    """The same filter, which looks at what it may make and counts what it has made."""
    passed = 1 if hasattr(filter, "jinja_pass_arg") else 0  # Jinja's own first argument

    @functools.wraps(filter)
    def bounded(*args: Any, **options: Any) -> Any:
        if name in GROWING_FILTERS and len(args) > passed:
            before, (subject, *rest) = args[:passed], args[passed:]
            if name == "join" and not isinstance(subject, str):
                subject = list(subject)  # a generator has no length
            check_growth(name, subject, [*rest, *options.values()])
            args = (*before, subject, *rest)
        return budget().made(filter(*args, **options))

    return bounded


def bounded_arguments(method: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call, after a look at what it may make. A text's `format` is Jinja's wrapper of it."""
    subject = getattr(getattr(method, "__wrapped__", method), "__self__", None)
    name = getattr(method, "__name__", "")
    if isinstance(subject, str) and name in GROWING_METHODS:
        if name == "join":
            args = tuple(arg if isinstance(arg, (str, dict)) else list(arg) for arg in args)
        check_growth(name, subject, [*args, *options.values()])
    return args
