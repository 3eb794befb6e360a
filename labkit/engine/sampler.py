"""Draws tokens for the rows of a step: which requests want what, and the state that their wishes need.

`kernels.sampling` knows the arithmetic; this file knows the slots. On the device, one row a slot:

    parameters [slots, 10] int32     temperature top_p min_p repetition presence frequency | top_k choice seed seed
                                     └──────────── float32, bit by bit ────────────────┘    └──── integers ─────┘
    seen       [slots, V] bool       tokens of prompt and output       ┐ made when the first request
    counts     [slots, V] int32      how often each is in the output   ┘ with penalties comes

The host keeps one byte of flags a slot, so that a step knows without asking the device what can be left out. A batch
of greedy requests is one argmax.

Unless one kernel draws everything, rows are ordered by what they cost: greedy ones, then plain draws, then those with
filters. Each kind is then a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from labkit.engine.request import Chunk, Sequence
from labkit.kernels import draw, sampling
from labkit.kernels.draw import Changes

NUM_PARAMETERS = 10
LARGE = 1e20  # beyond it, or its inverse, a factor changes no draw any more, but takes logits out of float32's range
SAMPLED, FILTERED, PENALISED, ADJUSTED, LOGPROBS = 1, 2, 4, 8, 16  # what a slot's request needs


@dataclass(slots=True)
class DrawPlan:
    """The host's part of one step's draws, made before the upload."""

    chunks: list[Chunk]  # those that draw, in the order of the rows of logits
    kinds: list[int]  # of each row: 0 greedy, 1 plain, 2 filtered
    needs: int  # flags of all rows, or-ed
    penalised: np.ndarray  # rows
    with_logprobs: np.ndarray  # rows
    adjustments: np.ndarray  # [3, n] int32: row, token, float32 bits of what is added to its logit
    parameters: np.ndarray  # [admitted, 1 + NUM_PARAMETERS] int32: slot, then its row
    history: np.ndarray  # [3, n] int32: slot, token, 1 if in the output; of admitted requests with penalties

    @property
    def is_simple(self) -> bool:
        """Nobody wants more than a draw from what the model says."""
        return not self.needs & (PENALISED | ADJUSTED | LOGPROBS)


class Sampler:
    """Sampling parameters and token counts of all slots.

    Args:
        fused: whether `kernels.draw` does everything at once, in Triton; else `kernels.sampling`, kind by kind.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device, fused: bool = False):
        self.fused = fused
        self.slots = slots
        self.vocab_size = vocab_size
        self.device = device
        self._parameters = torch.zeros(slots, NUM_PARAMETERS, dtype=torch.int32, device=device)
        self._floats = self._parameters[:, :6].view(torch.float32)
        self._needs = [0] * slots
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def plan(self, chunks: list[Chunk], admitted: list[Sequence]) -> DrawPlan:
        """Takes in the fresh slots and sorts the step's drawing chunks by kind."""
        for seq in admitted:
            self._needs[_slot(seq)] = _needs(seq)
        needs = [self._needs[_slot(chunk.seq)] for chunk in chunks]
        union = 0
        for flags in needs:
            union |= flags
        kinds = [flags & (SAMPLED | FILTERED) for flags in needs]
        if not self.fused and len(set(kinds)) > 1:
            order = sorted(range(len(chunks)), key=kinds.__getitem__)
            chunks = [chunks[i] for i in order]
            needs = [needs[i] for i in order]
            kinds = [kinds[i] for i in order]
        return DrawPlan(
            chunks,
            [0 if kind == 0 else 1 if kind == SAMPLED else 2 for kind in kinds],
            union,
            np.array([row for row, flags in enumerate(needs) if flags & PENALISED], np.int32),
            np.array([row for row, flags in enumerate(needs) if flags & LOGPROBS], np.int32),
            _adjustments(chunks, needs, self.vocab_size) if union & ADJUSTED else np.empty((3, 0), np.int32),
            np.array([_parameter_row(seq) for seq in admitted], np.int32).reshape(-1, 1 + NUM_PARAMETERS),
            _history(admitted),
        )

    def admit(self, parameters: Tensor, history: Tensor) -> None:
        """Writes the uploaded rows of fresh slots; the arguments are the plan's, on the device."""
        if not len(parameters):
            return
        self._parameters.index_copy_(0, parameters[:, 0].long(), parameters[:, 1:])
        if history.shape[1]:
            if self._counts is None:
                self._counts = torch.zeros(self.slots, self.vocab_size, dtype=torch.int32, device=self.device)
                self._seen = torch.zeros_like(self._counts, dtype=torch.bool)
            assert self._seen is not None
            slots, tokens, in_output = history.long().unbind(0)
            self._counts.index_fill_(0, slots, 0)
            self._seen.index_fill_(0, slots, False)
            self._counts.index_put_((slots, tokens), in_output.int(), accumulate=True)
            self._seen.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.bool))

    def draw(
        self,
        plan: DrawPlan,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        adjustments: Tensor | None = None,
        penalised: Tensor | None = None,
    ) -> Tensor:
        """Draws one token for each row.

        Args:
            logits: [S, V], the model's own. Left as they are.
            slots, positions: [S] int: whose row it is, and the index in the sequence of the token to draw
            adjustments: [3, n] and penalised: [n], the plan's, on the device; a simple plan has none

        Returns:
            [S] int64
        """
        if self.fused:
            changes = Changes()
            if plan.needs & ADJUSTED:
                changes.adjustments = adjustments
            if plan.needs & PENALISED:
                changes.seen, changes.counts = self._seen, self._counts
            return self.draw_fused(logits, slots, positions, bool(plan.needs & FILTERED), changes)
        logits = logits.float()
        if plan.needs & (ADJUSTED | PENALISED):
            assert adjustments is not None and penalised is not None
            logits = self._change(logits.clone(), plan, slots, adjustments, penalised)
        if not plan.needs & (SAMPLED | FILTERED):
            tokens = sampling.greedy(logits)
        else:
            tokens = self._draw_kinds(logits, plan, slots, positions)
        if plan.needs & PENALISED:
            assert self._counts is not None and self._seen is not None and penalised is not None
            rows = penalised.long()
            where = (slots.long()[rows], tokens[rows])
            self._counts.index_put_(where, torch.ones_like(penalised), accumulate=True)
            self._seen.index_put_(where, torch.ones_like(penalised, dtype=torch.bool))
        return tokens

    def draw_fused(
        self, logits: Tensor, slots: Tensor, positions: Tensor, filtered: bool, changes: Changes | None = None
    ) -> Tensor:
        """`draw` without a plan, for a graph. `filtered` says whether any row has top_k, top_p or min_p."""
        return draw.draw(logits, self._parameters, slots, positions, filtered=filtered, changes=changes)[0]

    def _change(self, logits: Tensor, plan: DrawPlan, slots: Tensor, adjustments: Tensor, penalised: Tensor) -> Tensor:
        """Bias, bans of min_tokens, and penalties, in place."""
        if plan.needs & ADJUSTED:
            rows, tokens = adjustments[:2].long().unbind(0)
            logits.index_put_((rows, tokens), adjustments[2].view(torch.float32), accumulate=True)
        if plan.needs & PENALISED:
            assert self._counts is not None and self._seen is not None
            rows = penalised.long()
            theirs = slots.long()[rows]
            repetition, presence, frequency = self._floats[theirs, 3:].unbind(1)
            changed = sampling.apply_penalties(
                logits[rows], self._seen[theirs], self._counts[theirs], repetition, presence, frequency
            )
            logits.index_copy_(0, rows, changed)
        return logits

    def _draw_kinds(self, logits: Tensor, plan: DrawPlan, slots: Tensor, positions: Tensor) -> Tensor:
        """Each kind of row with the cheapest function that is right for it."""
        parameters = self._parameters.index_select(0, slots)
        floats = self._floats.index_select(0, slots)
        top_k, choices = parameters[:, 6], parameters[:, 7]
        keys = sampling.noise_keys(parameters[:, 8:], choices, positions)
        tokens = []
        begin = 0
        for kind in range(3):
            count = plan.kinds.count(kind)
            rows = slice(begin, begin + count)
            begin += count
            if count == 0:
                continue
            if kind == 0:
                tokens.append(sampling.greedy(logits[rows]))
            elif kind == 1:
                tokens.append(sampling.sample(logits[rows], floats[rows, 0], keys[rows]))
            else:
                params = [chunk.seq.params for chunk in plan.chunks[rows]]
                tokens.append(
                    sampling.sample(
                        logits[rows],
                        floats[rows, 0],
                        keys[rows],
                        min_p=floats[rows, 2] if any(p.min_p > 0 for p in params) else None,
                        top_k=top_k[rows] if any(p.top_k > 0 for p in params) else None,
                        top_p=floats[rows, 1] if any(p.top_p < 1 for p in params) else None,
                    )
                )
        return torch.cat(tokens)


def _slot(seq: Sequence) -> int:
    assert seq.slot is not None, f"{seq.id} runs without a slot"
    return seq.slot


def _needs(seq: Sequence) -> int:
    params = seq.params
    flags = 0
    if not params.greedy:
        flags |= SAMPLED
        if params.has_filters:
            flags |= FILTERED
    if params.has_penalties:
        flags |= PENALISED
    if params.logit_bias or params.min_tokens > 0:
        flags |= ADJUSTED
    if params.logprobs is not None:
        flags |= LOGPROBS
    return flags


def _parameter_row(seq: Sequence) -> list[int]:
    """Slot and parameters as int32 words."""
    p = seq.params
    temperature = 0.0 if p.greedy else min(p.temperature, LARGE)
    repetition = min(max(p.repetition_penalty, 1 / LARGE), LARGE)
    numbers = (temperature, p.top_p, p.min_p, repetition, p.presence_penalty, p.frequency_penalty)
    seed = seq.seed & (2**64 - 1)
    words = np.array([seed & (2**32 - 1), seed >> 32], np.uint32).view(np.int32)
    top_k = min(max(p.top_k, 0), 2**31 - 1)
    return [_slot(seq), *np.array(numbers, np.float32).view(np.int32).tolist(), top_k, seq.index, *words.tolist()]


def _adjustments(chunks: list[Chunk], needs: list[int], vocab_size: int) -> np.ndarray:
    """Biases, and -inf for what must not come before min_tokens, of the rows that have any: [3, n]."""
    rows: list[int] = []
    tokens: list[int] = []
    values: list[float] = []
    for row, (chunk, flags) in enumerate(zip(chunks, needs, strict=True)):
        if not flags & ADJUSTED:
            continue
        params = chunk.seq.params
        added = list((params.logit_bias or {}).items())
        if chunk.start + chunk.length - chunk.seq.num_prompt_tokens < params.min_tokens:
            banned = chunk.seq.eos_token_ids.union(params.stop_token_ids or ())
            added += [(token, -np.inf) for token in banned if token < vocab_size]
        rows += [row] * len(added)
        tokens += [token for token, _ in added]
        values += [value for _, value in added]
    return np.stack((np.array(rows, np.int32), np.array(tokens, np.int32), np.array(values, np.float32).view(np.int32)))


def _history(admitted: list[Sequence]) -> np.ndarray:
    """Tokens so far of the requests with penalties: [3, n]."""
    slots: list[int] = []
    tokens: list[int] = []
    in_output: list[int] = []
    for seq in admitted:
        if seq.params.has_penalties:
            slots += [_slot(seq)] * seq.num_tokens
            tokens += seq.prompt_token_ids + seq.output_token_ids
            in_output += [0] * seq.num_prompt_tokens + [1] * len(seq.output_token_ids)
    return np.array((slots, tokens, in_output), np.int32)
