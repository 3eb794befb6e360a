"""Every exercise of every lesson: the stub is untried, the solution right, each wrong answer gets its own words."""

from __future__ import annotations

import pkgutil

import pytest

import labkit.lab.exercises
from labkit.lab.check import judge
from labkit.lab.exercises import Exercise, Wrong, exercises_of

LESSONS = [
    module.name.removeprefix("ex")
    for module in pkgutil.iter_modules(labkit.lab.exercises.__path__)
    if module.name.removeprefix("ex").isdecimal()
]
ALL = [exercise for lesson in LESSONS for exercise in exercises_of(lesson).values()]
WRONG = [pytest.param(e, wrong, id=f"{e.id} {wrong.name}") for e in ALL for wrong in e.wrong]


def test_there_are_lessons() -> None:
    assert "00" in LESSONS


@pytest.mark.parametrize("exercise", ALL, ids=lambda e: e.id)
def test_exercise(exercise: Exercise) -> None:
    assert judge(exercise, exercise.define(exercise.stub)).passed is None
    assert judge(exercise, exercise.define(exercise.solution)).passed is True
    assert len(exercise.wrong) >= 2
    assert len({wrong.message for wrong in exercise.wrong}) == len(exercise.wrong)
    assert exercise.difficulty in ("easy", "medium", "hard")
    assert len(exercise.hints) == 3
    assert all(exercise.hints)


@pytest.mark.parametrize(("exercise", "wrong"), WRONG)
def test_wrong_answer(exercise: Exercise, wrong: Wrong) -> None:
    verdict = judge(exercise, exercise.define(wrong.source))
    assert verdict.passed is False
    assert verdict.message == wrong.message
    assert [name for name, _ in verdict.facts] == ["case", "expected", "got", "difference"]
