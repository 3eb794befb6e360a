"""Verdicts: not tried, wrong with the smallest case that shows it, right; and what counts as the same answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from labkit.lab.check import difference, judge
from labkit.lab.exercises import Case, Exercise, Wrong, exercises_of, find_exercise

DOUBLE = Exercise(
    id="99.1",
    title="Double",
    name="double",
    difficulty="easy",
    stub="def double(x):\n    return ...\n",
    hints=("a", "b", "c"),
    solution="def double(x):\n    return 2 * x\n",
    wrong=(
        Wrong("square", "def double(x):\n    return x * x\n", "that is the square"),
        Wrong("plus two", "def double(x):\n    return x + 2\n", "that is two more"),
    ),
    cases=lambda: [Case(f"double({x})", lambda fn, x=x: fn(x)) for x in (2, 3, 5)],
)


def test_not_tried() -> None:
    verdict = judge(DOUBLE, DOUBLE.define(DOUBLE.stub))
    assert verdict.passed is None
    assert repr(verdict) == "⏳ 99.1 Double: not tried yet, about 1 line"


def test_lines_that_the_stub_gives_are_not_counted() -> None:
    stub = "def double(x):\n    two = 2\n    return ...\n"
    given = dataclasses.replace(
        DOUBLE, stub=stub, solution="def double(x):\n    two = 2\n    x = two * x\n    return x\n"
    )
    assert given.lines() == 2
    assert repr(judge(given, given.define(stub))).endswith("not tried yet, about 2 lines")


def test_right() -> None:
    assert repr(judge(DOUBLE, lambda x: x + x)) == "✅ 99.1 Double: right in every case"


def test_smallest_failing_case_with_the_message_of_the_mistake() -> None:
    # 2 * 2 == 2 + 2 == 2 squared: the first case shows nothing.
    verdict = judge(DOUBLE, lambda x: x + 2)
    assert verdict.message == "that is two more"
    assert dict(verdict.facts) == {"case": "double(3)", "expected": "6", "got": "5", "difference": "6 ≠ 5"}
    assert judge(DOUBLE, lambda x: x**2).message == "that is the square"


def test_a_mistake_that_nobody_foresaw() -> None:
    verdict = judge(DOUBLE, lambda x: 2 * x + (x == 5))
    assert (verdict.passed, verdict.message) == (False, "this is the smallest case that fails")
    assert dict(verdict.facts)["case"] == "double(5)"


def test_an_exception_is_shown_not_raised() -> None:
    verdict = judge(DOUBLE, lambda: 3)
    assert verdict.passed is False
    assert "TypeError" in dict(verdict.facts)["got"]


def test_forgotten_return_is_not_untried() -> None:
    verdict = judge(DOUBLE, lambda x: None)
    assert verdict.passed is False
    assert dict(verdict.facts)["got"] == "None"


def test_html_is_escaped() -> None:
    verdict = judge(DOUBLE, lambda x: "<script>")
    assert "<script>" not in verdict._repr_html_()
    assert "&lt;script&gt;" in verdict._repr_html_()


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (1.0, 1.00001),
        (4, 4.0),
        ([1, 2], torch.tensor([1, 2])),
        ((1, "memory"), [1, "memory"]),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.00001])),
        ({"a": [1]}, {"a": [1]}),
        (3, torch.tensor(3)),
    ],
)
def test_same(expected: Any, got: Any) -> None:
    assert difference(expected, got) is None


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (1.0, 1.01, "1.01 times"),
        (1.0, float("nan"), "nan"),
        (1, True, "≠"),
        (1.0, "1.0", "a number is expected, a str came"),
        ([1, 2], [1, 3], "at index 1"),
        ([1, 2], [1], "2 values are expected, 1 came"),
        ([1], None, "nothing (None) came"),
        (torch.zeros(2), torch.zeros(3), "shape (2,) is expected, (3,) came"),
        (torch.zeros(2), [0.0, 0.0], "a tensor is expected"),
        ({"a": 1}, {"b": 1}, "keys"),
    ],
)
def test_different(expected: Any, got: Any, words: str) -> None:
    found = difference(expected, got)
    assert found is not None
    assert words in found


def test_unknown_exercises_are_named() -> None:
    with pytest.raises(KeyError, match=r"00\.1, 00\.2"):
        find_exercise("00.99")
    with pytest.raises(KeyError, match="no lesson 77"):
        exercises_of("77")


def test_nan() -> None:
    nan, infinite = float("nan"), float("inf")
    assert difference(nan, nan) is None and difference(infinite, infinite) is None
    assert difference(1.0, nan) == "nan: 0 / 0, or infinity minus infinity"
    assert difference(nan, 1.0) is not None
