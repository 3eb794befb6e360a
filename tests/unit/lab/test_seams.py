"""A swap replaces the engine's function and always puts it back; every seam is there."""

from __future__ import annotations

import pytest
import torch

from labkit.kernels import rms_norm
from labkit.lab import seams


@pytest.mark.parametrize("name", seams.SEAMS)
def test_every_seam_is_there(name: str) -> None:
    assert callable(seams.original(name))


def test_swap_and_back() -> None:
    before = rms_norm.rms_norm
    x, weight = torch.ones(2, 4), torch.ones(4)
    with seams.swap("rms_norm", lambda x, weight, eps: x * 0) as swapped:
        assert rms_norm.rms_norm(x, weight, 1e-6).sum() == 0
        assert swapped.calls == 1
    assert rms_norm.rms_norm is before


def test_back_after_an_exception() -> None:
    before = rms_norm.rms_norm
    with pytest.raises(ZeroDivisionError), seams.swap("rms_norm", lambda *_: 1 / 0):
        rms_norm.rms_norm(torch.ones(1), torch.ones(1), 0.0)
    assert rms_norm.rms_norm is before


def test_refusals() -> None:
    with pytest.raises(KeyError, match="there is no seam 'norm'; there are greedy"), seams.swap("norm", print):
        pass
    with pytest.raises(TypeError, match="a function is needed"), seams.swap("greedy", 3):  # type: ignore[arg-type]
        pass
