"""The third kernel of `draw`: rows of which so many tokens matter that `filters` left them.

Either the list of those that may be kept is long, then the cut is looked for in it; or the row is flat, and there is no
such list. Then `cut` narrows where the cut is by reading the row a few times.

Letters: S rows that draw, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from labkit.kernels.cut import candidates, find_cut, first_tile, ordered, weigh, weigh_each
from labkit.kernels.draw_end import finish
from labkit.kernels.filters import list_groups, needs_mass
from labkit.kernels.gumbel import noise, noise_bits, row_keys
from labkit.kernels.jit import jit, tl


@jit
def flat_kernel(
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
    listed,
    tokens,
    own,
    rows,
    vocab,
    chunks,
    groups,
    LOGPROBS: tl.constexpr,
    PENALTIES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_TILE: tl.constexpr,
):
    """One row's token, if it has none yet."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if tl.load(tokens + row) >= 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    parameters += slot * 10
    k0, k1 = row_keys(parameters, tl.load(positions + row))
    token = _draw_flat(
        source + row.to(tl.int64) * source_stride,
        maxima + row * groups,
        listed + row * (2 * groups + 3),
        parameters,
        k0,
        k1,
        vocab,
        groups,
        GROUP,
        GROUPS,
        GROUP_TILE,
    )
    logits += row.to(tl.int64) * logits_stride
    parts += row * chunks
    seen += slot * vocab
    counts += slot * vocab
    finish(token, row, logits, parameters, seen, counts, parts, tokens, own, rows, chunks, LOGPROBS, PENALTIES, CHUNKS)


@jit
def _draw_flat(
    source,
    maxima,
    groups,
    parameters,
    k0,
    k1,
    vocab,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """`filters.draw_filtered` for the rows that it leaves, with what it left in `groups`."""
    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    top_p = tl.load(parameters + 1).to(tl.float32, bitcast=True)
    top_k = tl.load(parameters + 6)
    alone = needs_mass(parameters, vocab)
    tokens = groups + num_groups
    found = tl.load(tokens + num_groups)
    reach = tl.load(tokens + num_groups + 1).to(tl.uint32, bitcast=True)
    mass = tl.load(tokens + num_groups + 2).to(tl.float32, bitcast=True)
    total = tl.where(alone, mass, -1.0)
    lane = tl.arange(0, GROUPS)
    highest = tl.load(maxima + lane, mask=lane < num_groups, other=float("-inf"))
    highest = tl.div_rn(highest, temperature + tl.zeros_like(highest))
    best = tl.max(highest, 0)

    room = tl.minimum(num_groups, TILE)
    row = (source, tokens, tl.minimum(found, room), tl.full((), 1, tl.int32), vocab, temperature)
    first = first_tile(row, best, GROUP, TILE)
    many, heavy = weigh(first, reach)
    flat = (found > room) | (heavy < top_p * total)
    if flat:
        if alone:
            # However many tokens are below this, together they are too light to matter.
            reach = ordered(best + tl.log(0.5 * (1.0 - top_p) * mass / vocab))
        count = list_groups(highest, reach, groups, num_groups, GROUPS)
        row = (source, groups, count, tl.full((), GROUP, tl.int32), vocab, temperature)
        if alone:
            many += vocab  # about; narrowing will tell
            heavy = mass
        else:
            each, masses = weigh_each(row, best, reach + tl.zeros((4,), tl.uint32), GROUP, TILE)
            many = tl.max(each, 0)
            heavy = tl.max(masses, 0)
    keep = tl.where((top_k > 0) & (top_k < vocab), top_k, 2147483647)
    cut, ties = find_cut(row, first, flat, best, reach, many, heavy, keep, top_p, total, tokens, room, GROUP, TILE)
    return _race(row, k0, k1, cut, ties, GROUP, TILE)


@jit
def _race(row, k0, k1, cut, ties, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The largest of value + noise among the tokens that are kept, the lowest id on a tie."""
    best = float("-inf") + tl.zeros((), tl.float32)
    winner = tl.zeros((), tl.int32)
    passed = tl.zeros((), tl.int32)
    for begin in range(0, row[2] * row[3], TILE):
        ids, values, exists = candidates(row, begin, GROUP, TILE)
        keys = ordered(values)
        tied = (exists & (keys == cut)).to(tl.int32)
        kept = exists & ((keys > cut) | ((tied == 1) & (passed + tl.cumsum(tied, 0) <= ties)))
        passed += tl.sum(tied, 0)
        score = tl.where(kept, values + noise(noise_bits(k0, k1, ids)), float("-inf"))
        top = tl.max(score, 0)
        if top > best:
            winner = tl.min(tl.where(score == top, ids, 2147483647), 0)
            best = top
    return winner
