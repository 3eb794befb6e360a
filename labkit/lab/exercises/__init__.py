"""The exercises, one module a lesson: `ex07.py` has EXERCISES of lesson 07."""

from __future__ import annotations

import importlib

from labkit.lab.exercises.exercise import Case, Exercise, Wrong


def exercises_of(number: str) -> dict[str, Exercise]:
    """All exercises of a lesson by id, in their order.

    Raises:
        KeyError: if the lesson has none.
    """
    name = f"labkit.lab.exercises.ex{number}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise KeyError(f"there is no lesson {number} with exercises") from None
    return {exercise.id: exercise for exercise in module.EXERCISES}


def find_exercise(id: str) -> Exercise:
    """The exercise "07.2".

    Raises:
        KeyError: if there is none, naming those that there are.
    """
    known = exercises_of(id.split(".")[0])
    if id not in known:
        raise KeyError(f"there is no exercise {id}; this lesson has {', '.join(known)}")
    return known[id]


__all__ = ["Case", "Exercise", "Wrong", "exercises_of", "find_exercise"]
