"""Rows to draw for, with every combination of parameters, and what PyTorch's definition draws for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from labkit.kernels import sampling


@dataclass(frozen=True)
class Wishes:
    """A slot's parameters; the names are SamplingParams'."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    choice: int = 0
    seed: int = 0


def parameters(rows: list[Wishes], device: str = "cpu") -> Tensor:
    """[slots, 10] int32, as the engine keeps them."""
    out = []
    for w in rows:
        floats = np.array([w.temperature, w.top_p, w.min_p, w.repetition, w.presence, w.frequency], np.float32)
        words = np.array([w.seed & 0xFFFFFFFF, w.seed >> 32], np.uint32)
        out.append([*floats.view(np.int32).tolist(), w.top_k, w.choice, *words.view(np.int32).tolist()])
    return torch.tensor(out, dtype=torch.int32, device=device)


def changed(logits: Tensor, table: Tensor, slots: Tensor, adjustments: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
    """Bias and penalties as the definition has them."""
    rows, tokens = adjustments[:2].long().unbind(0)
    logits = logits.float().clone().index_put_((rows, tokens), adjustments[2].view(torch.float32), accumulate=True)
    repetition, presence, frequency = table[slots.long(), 3:6].view(torch.float32).unbind(1)
    return sampling.apply_penalties(logits, seen[slots.long()], counts[slots.long()], repetition, presence, frequency)


def defined(logits: Tensor, table: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Tokens of `sampling.sample`, one row at a time: [S] int64."""
    rows = table[slots.long()]
    floats = rows[:, :6].view(torch.float32)
    keys = sampling.noise_keys(rows[:, 8:], rows[:, 7], positions)
    tokens = [
        sampling.sample(
            logits[i : i + 1].float(),
            floats[i : i + 1, 0],
            keys[i : i + 1],
            min_p=floats[i : i + 1, 2] if floats[i, 2] > 0 else None,
            top_k=rows[i : i + 1, 6] if rows[i, 6] > 0 else None,
            top_p=floats[i : i + 1, 1] if floats[i, 1] < 1 else None,
        )
        for i in range(len(slots))
    ]
    return torch.cat(tokens)
