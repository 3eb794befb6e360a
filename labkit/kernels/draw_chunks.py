"""The first kernel of `draw`: reads every logit once, and leaves a few numbers for each chunk of a row.

Letters: S rows that draw, V vocabulary, C chunks of a row, N adjustments.
"""

from __future__ import annotations

from labkit.kernels.filters import is_filtered, needs_mass
from labkit.kernels.gumbel import log2_bound, noise_bits, row_keys
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
    PDL: tl.constexpr,
    ADJUSTED: tl.constexpr,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """One chunk of TILE logits, which stay in registers; the read is on its way while the parameters come."""
    if PDL:  # see `launch`
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    ids = chunk * TILE + tl.arange(0, TILE)
    value = tl.load(logits + row.to(tl.int64) * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    parameters += slot * 10
    part = parts + row * chunks + chunk
    if LOGPROBS:
        raw_max = tl.maximum(tl.max(value, 0), -3e38)  # finite: -inf - -inf would be no number
        tl.store(part + 2 * rows * chunks, raw_max)
        tl.store(part + 3 * rows * chunks, tl.sum(tl.exp(value - raw_max), 0))
    if ADJUSTED:
        value = _adjust(value, ids, adjustments, adjustments_stride, starts + row)
    if PENALTIES:
        value = _penalise(value, ids, vocab, parameters, seen + slot * vocab, counts + slot * vocab)
    if PENALTIES or ADJUSTED:
        tl.store(source + row.to(tl.int64) * source_stride + ids, value, mask=ids < vocab)

    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    if FILTERED:  # noqa: SIM102 - known when compiling; the other is not
        if is_filtered(parameters, vocab):
            of_groups = tl.max(tl.reshape(value, (TILE // GROUP, GROUP)), axis=1)
            group = chunk * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
            tl.store(maxima + row * groups + group, of_groups, mask=group < groups)
            if needs_mass(parameters, vocab):
                largest = tl.maximum(tl.max(of_groups, 0), -3e38)
                tl.store(part, largest)
                tl.store(part + rows * chunks, tl.sum(tl.exp((value - largest) * (1.0 / temperature)), 0))
            return
    if temperature > 0.0:
        k0, k1 = row_keys(parameters, tl.load(positions + row))
        # Negative, so that it is one multiply-add, and in units of ln 2, as the hardware's logarithm is.
        bound = value * (-1.4426950408889634 / temperature) + log2_bound(noise_bits(k0, k1, ids), FAST)
        best = tl.min(bound, 0) * -0.6931471805599453
    else:
        best = tl.max(value, 0)
    tl.store(part, best)


@jit
def _adjust(value, ids, adjustments, stride, start):
    """Adds the row's adjustments that lie in this chunk."""
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
