"""A guess made before the cell that measures: a number that was written down is one that can surprise."""

from __future__ import annotations

import math
from dataclasses import dataclass

NEAR = 1.25  # within a quarter counts as right: a box is not measured more finely than that


@dataclass(frozen=True)
class Prediction:
    """What the learner expects of `what`, in `unit`."""

    what: str
    guess: float
    unit: str = ""

    def __str__(self) -> str:
        return f"Kept: {self.what}: {self._say(self.guess)}"

    def compare(self, measured: float) -> None:
        """Print the guess beside the measured value."""
        print(f"{self.what}: you said {self._say(self.guess)}, it is {self._say(measured)}. {self._verdict(measured)}")

    def _say(self, value: float) -> str:
        return f"{value:,.3g} {self.unit}".strip() if abs(value) < 1000 else f"{value:,.0f} {self.unit}".strip()

    def _verdict(self, measured: float) -> str:
        if self.guess <= 0 or measured <= 0:
            return f"Off by {self._say(abs(measured - self.guess))}."
        ratio = measured / self.guess
        if 1 / NEAR <= ratio <= NEAR:
            return "Well judged."
        return f"That is {max(ratio, 1 / ratio):.1f} times {'more' if ratio > 1 else 'less'}."


def predict(what: str, guess: float, unit: str = "") -> Prediction:
    """Keep a guess and say so.

    Raises:
        ValueError: if the guess is no number.
    """
    if isinstance(guess, bool) or not isinstance(guess, (int, float)) or not math.isfinite(guess):
        raise ValueError(f"the guess is {guess!r}; write a number, a wrong one is fine")
    prediction = Prediction(what, float(guess), unit)
    print(prediction)
    return prediction
