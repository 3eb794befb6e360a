from __future__ import annotations

import pytest

from labkit.lab.predict import predict


def test_kept_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    guess = predict("time of a token", 10, "ms")
    guess.compare(40)
    guess.compare(2)
    guess.compare(11)
    assert capsys.readouterr().out.splitlines() == [
        "Kept: time of a token: 10 ms",
        "time of a token: you said 10 ms, it is 40 ms. That is 4.0 times more.",
        "time of a token: you said 10 ms, it is 2 ms. That is 5.0 times less.",
        "time of a token: you said 10 ms, it is 11 ms. Well judged.",
    ]


@pytest.mark.parametrize("guess", ["10", None, True, float("nan"), float("inf")])
def test_a_guess_is_a_number(guess: object) -> None:
    with pytest.raises(ValueError, match="write a number"):
        predict("x", guess)  # type: ignore[arg-type]


def test_no_ratio_to_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    predict("blocks lost", 0).compare(3)
    assert capsys.readouterr().out.splitlines()[-1] == "blocks lost: you said 0, it is 3. Off by 3."
