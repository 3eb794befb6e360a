"""What every drawn token ends with, in the kernels of `draw`: it is stored, weighed and counted.

Letters: S rows that draw, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from labkit.kernels.jit import jit, tl


@jit
def finish(
    token,
    row,
    logits,
    parameters,
    seen,
    counts,
    parts,
    tokens,
    own,
    rows,
    chunks,
    LOGPROBS: tl.constexpr,
    PENALTIES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Stores the row's token; logits, parameters, seen, counts and parts are the row's own, tokens and own are [S]."""
    tl.store(tokens + row, token.to(tl.int64))
    if LOGPROBS:
        chunk = tl.arange(0, CHUNKS)
        raw_max = tl.load(parts + 2 * rows * chunks + chunk, mask=chunk < chunks, other=-3e38)
        raw_mass = tl.load(parts + 3 * rows * chunks + chunk, mask=chunk < chunks, other=0.0)
        top = tl.max(raw_max, 0)
        normaliser = top + tl.log(tl.sum(raw_mass * tl.exp(raw_max - top), 0))
        tl.store(own + row, tl.load(logits + token).to(tl.float32) - normaliser)
    if PENALTIES:
        _enter(token, parameters, seen, counts)


@jit
def _enter(token, parameters, seen, counts):
    """Counts the drawn token, if the slot's request has penalties."""
    repetition = tl.load(parameters + 3).to(tl.float32, bitcast=True)
    presence = tl.load(parameters + 4).to(tl.float32, bitcast=True)
    frequency = tl.load(parameters + 5).to(tl.float32, bitcast=True)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        tl.store(counts + token, tl.load(counts + token) + 1)
        tl.store(seen + token, 1)
