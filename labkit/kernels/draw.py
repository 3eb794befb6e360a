"""A step's whole draw in two Triton kernels: `sampling` is the definition, row by row.

    logits [S, V] ──▶ first kernel, one program a chunk of a row          second kernel, one program a row
                      ├ bias, min_tokens, penalties (if any, into a copy)
                      ├ log-sum-exp of the raw logits (if asked)   ──────▶ log-probability of the token
                      ├ plain row:    best of logits/T + noise     ──────▶ best of the chunks
                      └ filtered row: largest of each small group  ──────▶ what the filters keep, best of it (`filters`)

A greedy row is a plain row without noise. Parameters are read from the slots' rows on the device, so nothing waits for
the host and a CUDA graph can hold it all.

Letters: S rows that draw, V vocabulary, C chunks of a row, N adjustments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.filters import draw_filtered
from labkit.kernels.gumbel import noise, noise_bits, noise_bound, row_keys
from labkit.kernels.jit import interpreted, jit, tl, triton
from labkit.kernels.tiles import power_of_two

TILE, TILES = 512, 8  # logits that a warp has in registers; tiles of a chunk
MAX_GROUPS = 4096  # groups of a row, for the second kernel's registers
GROUP_TILE = 2048  # logits of groups at once


@dataclass(slots=True)
class Changes:
    """What is added to a step's logits before the draw; None: nothing of the kind.

    seen and counts are one row a slot; the drawn token is entered for rows whose penalties are on.
    """

    adjustments: Tensor | None = None  # [3, N] int32 sorted by row: row, token, float32 bits; rows >= S are ignored
    seen: Tensor | None = None  # [slots, V] bool: in prompt or output
    counts: Tensor | None = None  # [slots, V] int32: how often in the output


def draw(
    logits: Tensor,
    parameters: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    filtered: bool = True,
    logprobs: bool = False,
    changes: Changes | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row.

    Args:
        logits: [S, V] float32 or 16 bits, the model's own. Left as they are.
        parameters: [slots, 10] int32, as `engine.sampler` describes them
        slots, positions: [S] int32: whose row it is, and the index in the sequence of the token to draw
        filtered: whether any row has top_k, top_p or min_p. Rows without are as fast either way.
        logprobs: whether to compute them, of the tokens under the raw logits

    Returns:
        (tokens [S] int64, log-probabilities [S] float32, undefined unless asked for)
    """
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    own = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return tokens, own
    assert logits.stride(1) == 1 and parameters.is_contiguous()
    changes = changes or Changes()
    changed = changes.counts is not None or changes.adjustments is not None
    chunks = triton.cdiv(vocab, TILE * TILES)
    group = max(32, power_of_two(triton.cdiv(vocab, MAX_GROUPS)))
    groups = triton.cdiv(vocab, group)
    # Of each chunk: best score, mass if filtered, largest raw logit, raw mass.
    parts = torch.empty(4, rows, chunks, dtype=torch.float32, device=device)
    winners = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    maxima = torch.empty(rows, groups if filtered else 0, dtype=torch.float32, device=device)
    listed = torch.empty(rows, groups if filtered else 0, dtype=torch.int32, device=device)
    source = torch.empty(rows, vocab, dtype=torch.float32, device=device) if changed else logits
    seen, counts = (slots if x is None else x for x in (changes.seen, changes.counts))
    adjustments = slots.unsqueeze(0) if changes.adjustments is None else changes.adjustments
    starts = slots if changes.adjustments is None else _starts(changes.adjustments, rows)
    state = (logits, source, logits.stride(0), source.stride(0), parameters, slots, positions, seen, counts)
    sizes = (rows, vocab, chunks, groups)
    options = {"FILTERED": filtered, "LOGPROBS": logprobs, "PENALTIES": changes.counts is not None, "GROUP": group}
    _chunk_kernel[(rows, chunks)](
        *state,
        *(parts, winners, maxima, adjustments, adjustments.stride(0), starts),
        *sizes,
        **options,
        ADJUSTED=changes.adjustments is not None,
        TILE=TILE,
        TILES=TILES,
        FAST=not interpreted(),
        num_warps=1,
    )
    _row_kernel[(rows,)](
        *state,
        *(parts, winners, maxima, listed, tokens, own),
        *sizes,
        **options,
        CHUNKS=power_of_two(chunks),
        GROUPS=power_of_two(groups),
        TILE=GROUP_TILE,
        num_warps=8 if filtered else 1,
    )
    return tokens, own


def _starts(adjustments: Tensor, rows: int) -> Tensor:
    """Where each row's adjustments begin, and the last one's end: [S + 1] int32."""
    bounds = torch.arange(rows + 1, dtype=torch.int32, device=adjustments.device)
    return torch.searchsorted(adjustments[0].contiguous(), bounds, out_int32=True)


@jit
def _is_filtered(parameters, vocab):
    """Whether the slot's row draws among some of the tokens only."""
    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    top_p = tl.load(parameters + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(parameters + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(parameters + 6)
    return (temperature > 0.0) & ((top_p < 1.0) | (min_p > 0.0) | ((top_k > 0) & (top_k < vocab)))


@jit
def _chunk_kernel(
    logits,
    source,
    logits_stride,
    source_stride,
    parameters,
    slots,
    positions,
    seen,
    counts,
    parts,
    winners,
    maxima,
    adjustments,
    adjustments_stride,
    starts,
    rows,
    vocab,
    chunks,
    groups,
    FILTERED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    PENALTIES: tl.constexpr,
    GROUP: tl.constexpr,
    ADJUSTED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FAST: tl.constexpr,
):
    """One warp, one chunk of TILE × TILES logits. What it reads twice is in its cache the second time."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    begin = chunk * (TILE * TILES)
    slot = tl.load(slots + row).to(tl.int64)
    parameters += slot * 10
    logits += row.to(tl.int64) * logits_stride
    source += row.to(tl.int64) * source_stride
    part = parts + row * chunks + chunk
    if LOGPROBS:
        raw_max, raw_mass = _mass(logits, 1.0, begin, vocab, maxima, GROUP, False, TILE, TILES)
        tl.store(part + 2 * rows * chunks, raw_max)
        tl.store(part + 3 * rows * chunks, raw_mass)
    if PENALTIES or ADJUSTED:
        for tile in range(TILES):
            ids = begin + tile * TILE + tl.arange(0, TILE)
            value = tl.load(logits + ids, mask=ids < vocab, other=0.0).to(tl.float32)
            if ADJUSTED:
                value = _adjust(value, ids, adjustments, adjustments_stride, starts + row)
            if PENALTIES:
                value = _penalise(value, ids, vocab, parameters, seen + slot * vocab, counts + slot * vocab)
            tl.store(source + ids, value, mask=ids < vocab)
        tl.debug_barrier()  # other threads read what this one wrote

    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    if FILTERED:  # noqa: SIM102 - known when compiling; the other is not
        if _is_filtered(parameters, vocab):
            largest, mass = _mass(
                source, 1.0 / temperature, begin, vocab, maxima + row * groups, GROUP, True, TILE, TILES
            )
            tl.store(part, largest)
            tl.store(part + rows * chunks, mass)
            return
    k0, k1 = row_keys(parameters, tl.load(positions + row))
    best, winner = _best(source, temperature, k0, k1, begin, vocab, TILE, TILES, FAST)
    tl.store(part, best)
    tl.store(winners + row * chunks + chunk, winner)


@jit
def _adjust(value, ids, adjustments, stride, start):
    """Adds the row's adjustments that lie in this tile."""
    for entry in range(tl.load(start), tl.load(start + 1)):
        token = tl.load(adjustments + stride + entry)
        amount = tl.load(adjustments + 2 * stride + entry).to(tl.float32, bitcast=True)
        value = tl.where(ids == token, value + amount, value)
    return value


@jit
def _penalise(value, ids, vocab, parameters, seen, counts):
    """`sampling.apply_penalties`, if the slot's request has any."""
    repetition = tl.load(parameters + 3).to(tl.float32, bitcast=True)
    presence = tl.load(parameters + 4).to(tl.float32, bitcast=True)
    frequency = tl.load(parameters + 5).to(tl.float32, bitcast=True)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        known = tl.load(seen + ids, mask=ids < vocab, other=0) != 0
        count = tl.load(counts + ids, mask=ids < vocab, other=0)
        factor = tl.where(known, repetition, 1.0)
        value = tl.where(value > 0, tl.div_rn(value, factor), value * factor)
        value = value - tl.where(count > 0, presence, 0.0)
        value = value - frequency * count.to(tl.float32)
    return value


@jit
def _mass(
    source,
    scale,
    begin,
    vocab,
    maxima,
    GROUP: tl.constexpr,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """(largest logit of a chunk, sum of exp((logit - largest) * scale)); with KEEP also each group's largest."""
    largest = tl.full((), -3e38, tl.float32)
    mass = tl.zeros((), tl.float32)
    for tile in range(tl.minimum(TILES, tl.cdiv(vocab - begin, TILE))):
        first = begin + tile * TILE
        ids = first + tl.arange(0, TILE)
        value = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        if KEEP:
            of_groups = tl.max(tl.reshape(value, (TILE // GROUP, GROUP)), axis=1)
            group = first // GROUP + tl.arange(0, TILE // GROUP)
            tl.store(maxima + group, of_groups, mask=group * GROUP < vocab)
        top = tl.maximum(largest, tl.max(value, 0))
        mass = mass * tl.exp((largest - top) * scale) + tl.sum(tl.exp((value - top) * scale), 0)
        largest = top
    return largest, mass


@jit
def _best(source, temperature, k0, k1, begin, vocab, TILE: tl.constexpr, TILES: tl.constexpr, FAST: tl.constexpr):
    """(score, id) of a chunk's largest logit / temperature + noise, the lowest id on a tie; without noise if greedy."""
    sampled = temperature > 0.0
    temperature = tl.where(sampled, temperature, 1.0)
    scale = 1.0 / temperature
    best = float("-inf") + tl.zeros((), tl.float32)
    winner = begin
    for tile in range(tl.minimum(TILES, tl.cdiv(vocab - begin, TILE))):
        ids = begin + tile * TILE + tl.arange(0, TILE)
        value = tl.load(source + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        bound = value * scale
        if sampled:
            bound += noise_bound(noise_bits(k0, k1, ids), FAST)
        # Seldom so after the first few tiles: the n-th of them holds the best so far with a chance of 1/n.
        if tl.max(bound, 0) > best - 1e-3 - 1e-6 * tl.abs(best):
            score = tl.div_rn(value, temperature + tl.zeros_like(value))
            if sampled:
                score += noise(noise_bits(k0, k1, ids))
            top = tl.max(score, 0)
            if top > best:
                winner = tl.min(tl.where(score == top, ids, 2147483647), 0)
                best = top
    return best, winner


@jit
def _row_kernel(
    logits,
    source,
    logits_stride,
    source_stride,
    parameters,
    slots,
    positions,
    seen,
    counts,
    parts,
    winners,
    maxima,
    listed,
    tokens,
    own,
    rows,
    vocab,
    chunks,
    groups,
    FILTERED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    PENALTIES: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """From the chunks of one row to its token."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    parameters += slot * 10
    parts += row * chunks
    plane = rows * chunks
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    value = tl.load(parts + chunk, mask=there, other=float("-inf"))
    best = tl.max(value, 0)
    ids = tl.load(winners + row * chunks + chunk, mask=there, other=2147483647)
    token = tl.min(tl.where(there & (value == best), ids, 2147483647), 0)
    if FILTERED:  # noqa: SIM102 - known when compiling; the other is not
        if _is_filtered(parameters, vocab):
            temperature = tl.load(parameters).to(tl.float32, bitcast=True)
            masses = tl.load(parts + plane + chunk, mask=there, other=0.0)
            k0, k1 = row_keys(parameters, tl.load(positions + row))
            token = draw_filtered(
                source + row.to(tl.int64) * source_stride,
                maxima + row * groups,
                listed + row * groups,
                tl.sum(masses * tl.exp((value - best) / temperature), 0),
                temperature,
                tl.load(parameters + 1).to(tl.float32, bitcast=True),
                tl.load(parameters + 2).to(tl.float32, bitcast=True),
                tl.load(parameters + 6),
                k0,
                k1,
                vocab,
                groups,
                GROUP,
                GROUPS,
                TILE,
            )
    tl.store(tokens + row, token.to(tl.int64))
    if LOGPROBS:
        raw_max = tl.load(parts + 2 * plane + chunk, mask=there, other=-3e38)
        raw_mass = tl.load(parts + 3 * plane + chunk, mask=there, other=0.0)
        top = tl.max(raw_max, 0)
        normaliser = top + tl.log(tl.sum(raw_mass * tl.exp(raw_max - top), 0))
        tl.store(own + row, tl.load(logits + row.to(tl.int64) * logits_stride + token).to(tl.float32) - normaliser)
    if PENALTIES:
        _enter(token, parameters, seen + slot * vocab, counts + slot * vocab)


@jit
def _enter(token, parameters, seen, counts):
    """Counts the drawn token, if the slot's request has penalties."""
    repetition = tl.load(parameters + 3).to(tl.float32, bitcast=True)
    presence = tl.load(parameters + 4).to(tl.float32, bitcast=True)
    frequency = tl.load(parameters + 5).to(tl.float32, bitcast=True)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        tl.store(counts + token, tl.load(counts + token) + 1)
        tl.store(seen + token, 1)
