"""`lab.check`: has the learner's function the right answers, and if not, where is the smallest case that shows it?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labkit.lab.exercises import Case, Exercise, Wrong, find_exercise
from labkit.lab.exercises.exercise import Verdict

NUMBERS = 1e-4  # relative difference at which two numbers are still the same: float32 in another order of adding
LONG = 160  # characters of a value that are shown


class Raised:
    """In place of an answer: the function did not give one."""

    def __init__(self, error: Exception):
        self.text = f"{type(error).__name__}: {error}"

    def __repr__(self) -> str:
        return self.text


def difference(expected: Any, got: Any) -> str | None:
    """Where `got` first differs from `expected`, in words; None if it does not."""
    if isinstance(got, Raised):
        return "it raised an exception"
    if hasattr(expected, "tolist"):
        if not hasattr(got, "tolist"):
            return f"a tensor is expected, {_type(got)} came"
        if tuple(expected.shape) != tuple(got.shape):
            return f"shape {tuple(expected.shape)} is expected, {tuple(got.shape)} came"
        return difference(expected.tolist(), got.tolist())
    if hasattr(got, "tolist") and getattr(got, "ndim", None) == 0:
        got = got.item()
    if isinstance(expected, (list, tuple)):
        return _difference_of_lists(expected, got)
    if isinstance(expected, dict):
        if not isinstance(got, dict) or set(got) != set(expected):
            return f"the keys {sorted(expected)} are expected"
        found = ((key, difference(expected[key], got[key])) for key in expected)
        return next((f"{key}: {text}" for key, text in found if text), None)
    if isinstance(expected, float) or (isinstance(expected, int) and isinstance(got, float)):
        return _difference_of_numbers(expected, got)
    return None if type(expected) is type(got) and expected == got else f"{_short(expected)} ≠ {_short(got)}"


def _difference_of_lists(expected: list[Any] | tuple[Any, ...], got: Any) -> str | None:
    if hasattr(got, "tolist"):
        got = got.tolist()
    if not isinstance(got, (list, tuple)):
        return f"{_type(expected)} is expected, {_type(got)} came"
    if len(got) != len(expected):
        return f"{len(expected)} values are expected, {len(got)} came"
    found = ((place, difference(a, b)) for place, (a, b) in enumerate(zip(expected, got)))
    return next((f"at index {place}: {text}" for place, text in found if text), None)


def _difference_of_numbers(expected: float, got: Any) -> str | None:
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return f"a number is expected, {_type(got)} came"
    if math.isnan(got) and math.isnan(expected):
        return None
    if math.isnan(got):
        return "nan: 0 / 0, or infinity minus infinity"
    if got == expected or abs(got - expected) <= NUMBERS * abs(expected):
        return None
    times = f", {got / expected:.4g} times what is expected" if expected else ""
    return f"{got - expected:+.4g}{times}"


def _type(value: Any) -> str:
    name = type(value).__name__
    return "nothing (None)" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONG else text[: LONG - 1] + "…"


def _answer(case: Case, fn: Callable[..., Any]) -> Any:
    try:
        return case.run(fn)
    except Exception as error:
        return Raised(error)


def _untried(answer: Any) -> bool:
    if isinstance(answer, dict):
        return any(map(_untried, answer.values()))
    return answer is Ellipsis or (isinstance(answer, Raised) and answer.text.startswith("NotImplementedError"))


def judge(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    """Run the learner's function on every case of the exercise."""
    right = exercise.define(exercise.solution)
    for count, case in enumerate(exercise.cases(), start=1):
        expected, got = _answer(case, right), _answer(case, fn)
        if _untried(got):
            lines = exercise.lines()
            return Verdict(exercise.id, exercise.title, None, f"not tried yet, about {lines} line{'s' * (lines > 1)}")
        if (text := difference(expected, got)) is not None:
            facts = (("case", case.text), ("expected", _short(expected)), ("got", _short(got)), ("difference", text))
            return Verdict(exercise.id, exercise.title, False, explain(exercise, fn, count), facts)
    return Verdict(exercise.id, exercise.title, True, "right in every case")


def explain(exercise: Exercise, fn: Callable[..., Any], upto: int) -> str:
    """What to tell the learner: the message of the wrong answer that theirs equals in every case, if there is one."""
    same = [wrong for wrong in exercise.wrong if _answers_alike(exercise, fn, wrong)]
    if same:
        return same[0].message
    return "this is the smallest case that fails" if upto > 1 else "already the smallest case fails"


def _answers_alike(exercise: Exercise, fn: Callable[..., Any], wrong: Wrong) -> bool:
    theirs = exercise.define(wrong.source)
    for case in exercise.cases():
        a, b = _answer(case, theirs), _answer(case, fn)
        alike = a.text == b.text if isinstance(a, Raised) and isinstance(b, Raised) else difference(a, b) is None
        if not alike:
            return False
    return True


def check(id: str, fn: Callable[..., Any]) -> Verdict:
    """The verdict on the learner's `fn` for the exercise `id`, to be shown as the last value of a cell."""
    return judge(find_exercise(id), fn)
