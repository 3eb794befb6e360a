"""The first kernel of `draw`: reads every logit once, and leaves a few numbers for each chunk of a row.

Letters: S rows that draw, V vocabulary, C chunks of a row, N adjustments.
"""

from __future__ import annotations

from labkit.kernels.filters import is_filtered
from labkit.kernels.gumbel import noise, noise_bits, noise_bound, row_keys
from labkit.kernels.jit import jit, tl


@jit
def chunk_kernel(
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
        if is_filtered(parameters, vocab):
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
