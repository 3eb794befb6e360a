"""Attention tile by tile, with a note of what is known after each: a learner's step, run and watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]  # best score m [T], sum of weights l [T], weighted values o [T, D], undivided
TakeTile = Callable[..., State]


@dataclass
class Online:
    """What happened, for T queries that are the last of N tokens."""

    scores: Tensor  # [T, N], which no step ever had as a whole
    seen: Tensor  # [T, N] bool
    tiles: list[tuple[int, int]]  # first key, and one behind the last
    states: list[State] = field(default_factory=list)  # after each tile; the first is before all of them

    def shrink(self, step: int) -> Tensor:
        """[T]: by what a tile multiplied that which rows had before it. 1 where no larger score came."""
        before, after = self.states[step][0], self.states[step + 1][0]
        return torch.where(before == after, 1.0, torch.exp(before - after))


def empty_state(rows: int, head_dim: int) -> State:
    """Nothing seen yet."""
    return torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, head_dim)


def attend_in_steps(take_tile: TakeTile, q: Tensor, k: Tensor, v: Tensor, tile: int) -> Online:
    """Runs `take_tile` over all tiles of keys, causally, on the CPU.

    Args:
        take_tile: (m [T], l [T], o [T, D], q, a tile of k and v [n, D], seen [T, n] bool) -> m, l, o
        q: [T, D], of the last T tokens
        k, v: [N, D]
        tile: keys of a tile; the last may have fewer

    Raises:
        ValueError: a tile has no keys, or there are more queries than keys.
    """
    (rows, head_dim), length = q.shape, k.shape[0]
    if tile < 1 or rows > length:
        raise ValueError(f"tiles of {tile} keys, {rows} queries of {length} tokens; give at least 1 key and T <= N")
    seen = torch.arange(length) <= torch.arange(length - rows, length)[:, None]
    tiles = [(begin, min(begin + tile, length)) for begin in range(0, length, tile)]
    online = Online(q @ k.T / head_dim**0.5, seen, tiles, [empty_state(rows, head_dim)])
    for begin, end in tiles:
        m, l, o = (x.clone() for x in online.states[-1])
        online.states.append(take_tile(m, l, o, q, k[begin:end], v[begin:end], seen[:, begin:end]))
    return online
