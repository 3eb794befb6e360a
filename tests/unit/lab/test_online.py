"""Attention in steps: what is kept, and how it is drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from labkit.lab.exercises.ex06 import TILE
from labkit.lab.online import Online, attend_in_steps
from labkit.lab.widgets.online import render, widget

take_tile = TILE.define(TILE.solution)


def some(rows: int, length: int, head_dim: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(30)
    q, k, v = (torch.randn(n, head_dim, generator=generator) for n in (rows, length, length))
    return q, k, v


@pytest.fixture
def online() -> Online:
    return attend_in_steps(take_tile, *some(3, 8), tile=3)


@pytest.mark.parametrize(("rows", "length", "tile"), [(1, 1, 1), (1, 7, 3), (3, 8, 3), (5, 5, 2), (5, 5, 9)])
def test_the_last_state_is_attention(rows: int, length: int, tile: int) -> None:
    q, k, v = some(rows, length)
    online = attend_in_steps(take_tile, q, k, v, tile)
    _, l, o = online.states[-1]
    want = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=online.seen)[0]
    torch.testing.assert_close(o / l[:, None], want)
    assert online.tiles[-1][1] == length and len(online.states) == len(online.tiles) + 1
    assert online.seen[-1].all() and int(online.seen[0].sum()) == length - rows + 1


def test_a_step_that_writes_over_its_input_harms_nothing() -> None:
    def in_place(m: Tensor, l: Tensor, o: Tensor, *tile: Tensor) -> tuple[Tensor, ...]:
        new = take_tile(m, l, o, *tile)
        return tuple(old.copy_(value) for old, value in zip((m, l, o), new, strict=True))

    kept, want = (attend_in_steps(step, *some(3, 8), tile=3) for step in (in_place, take_tile))  # type: ignore[arg-type]
    for states in zip(kept.states, want.states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize(("rows", "length", "tile"), [(4, 3, 1), (1, 3, 0)])
def test_what_cannot_be(rows: int, length: int, tile: int) -> None:
    with pytest.raises(ValueError, match="give at least 1 key and T <= N"):
        attend_in_steps(take_tile, *some(rows, length), tile=tile)


def test_shrink_is_what_the_rows_were_multiplied_by(online: Online) -> None:
    for step, (begin, end) in enumerate(online.tiles):
        before, after = online.states[step][0], online.states[step + 1][0]
        inside = online.scores.masked_fill(~online.seen, -torch.inf)[:, begin:end]
        assert torch.equal(after, torch.maximum(before, inside.amax(1)))
        assert torch.equal(online.shrink(step) < 1, after > before)


def test_a_frame_shows_its_tile_and_says_who_shrank(online: Online) -> None:
    first, second = render(online, 0), render(online, 1)
    assert first == render(online, 0), "pure"
    assert first.words == "Tile 0, keys 0 to 2: there was nothing before it."
    assert "keys 3 to 5" in second.words and first.svg != second.svg
    for row, by in enumerate(online.shrink(1).tolist()):
        assert (f"query {5 + row} × {by:.2f}" in second.words) == (by < 1)
    assert f"{online.states[2][0][0]:.2f}" in second.svg


def test_nothing_larger_is_said_too() -> None:
    q, k, v = some(1, 4)
    falling = attend_in_steps(take_tile, q, k[(q @ k.T)[0].argsort(descending=True)], v, tile=1)
    assert render(falling, 2).words == "Tile 2, key 2: no larger score came, so what was known stays as it is."


def test_the_slider_moves_the_picture(online: Online) -> None:
    stepper = widget(online, start=1)
    before = stepper.picture.value
    stepper.slider.value = 2
    assert stepper.picture.value != before and "Tile 2" in stepper.picture.value
    assert "<figure>" in stepper.static_html()


def test_too_much_to_draw() -> None:
    with pytest.raises(ValueError, match="at most can be drawn"):
        widget(attend_in_steps(take_tile, *some(3, 9), tile=3))
