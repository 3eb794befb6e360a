"""Where the filters cut a row of which many tokens matter: a bisection on the bits of floats.

Bits make integers that are ordered as the floats are, so at most 32 pivots settle it: the tokens at or above each are
counted, or their probabilities added up. The tokens that a list names stay in registers for all pivots. A flat row has
too many for a list, so every pivot means reading it all. Then four pivots at once narrow where the cut may be, until
the list has room for the tokens between; the rest of the bisection counts those alone, on top of what is known to be
above.

Letters: V vocabulary.
"""

from __future__ import annotations

from labkit.kernels.jit import jit, tl


@jit
def ordered(x):
    """float32 -> uint32 in the same order; -0.0 and 0.0 are the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@jit
def unordered(key):
    """The float32 that `ordered` made this uint32 of."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (((bits >> 31) ^ -1) | -2147483648)).to(tl.float32, bitcast=True)


@jit
def candidates(row, begin, GROUP: tl.constexpr, TILE: tl.constexpr):
    """TILE tokens of the row's list, from the begin-th on, by rising id.

    Args:
        row: (the logits [V], a list, its length, 1 if it lists tokens and GROUP if groups, V, temperature)

    Returns:
        ids, values, which of them exist; each [TILE]
    """
    source, listed, count, size, vocab, temperature = row
    lane = begin + tl.arange(0, TILE)
    place = tl.where(size == 1, lane, lane // GROUP)
    ids = tl.load(listed + place, mask=place < count, other=0) * size + tl.where(size == 1, 0, lane % GROUP)
    exists = (place < count) & (ids < vocab)
    values = tl.load(source + ids, mask=exists, other=float("-inf")).to(tl.float32)
    return ids, tl.div_rn(values, temperature + tl.zeros_like(values)), exists


@jit
def first_tile(row, best, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Keys and weights of the first TILE tokens of the row's list; 0 where there is none."""
    _ids, values, exists = candidates(row, 0, GROUP, TILE)
    return tl.where(exists, ordered(values), 0), tl.where(exists, tl.exp(values - best), 0.0)


@jit
def list_tokens(row, low, high, tokens, room, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Lists the ids of the tokens from low to high, as far as there is room; how many they are, or too many."""
    found = tl.zeros((), tl.int32)
    begin = tl.zeros((), tl.int32)
    while (begin < row[2] * row[3]) & (found <= room):
        ids, values, exists = candidates(row, begin, GROUP, TILE)
        keys = ordered(values)
        hit = exists & (keys >= low) & (keys <= high)
        order = found + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(tokens + order, ids, mask=hit & (order < room))
        found += tl.sum(hit.to(tl.int32), 0)
        begin += TILE
    tl.debug_barrier()
    return found


@jit
def weigh(first, pivot):
    """How many of the tokens whose keys and weights `first` holds are at or above the pivot, and their mass."""
    keys, weights = first
    hit = keys >= pivot
    return tl.sum(hit.to(tl.int32), 0), tl.sum(tl.where(hit, weights, 0.0), 0)


@jit
def weigh_each(row, best, pivots, GROUP: tl.constexpr, TILE: tl.constexpr):
    """`weigh` for four pivots in one reading of the row: two [4]."""
    many = tl.zeros((4,), tl.int32)
    mass = tl.zeros((4,), tl.float32)
    for begin in range(0, row[2] * row[3], TILE):
        _ids, values, exists = candidates(row, begin, GROUP, TILE)
        hit = exists[None, :] & (ordered(values)[None, :] >= pivots[:, None])
        many += tl.sum(hit.to(tl.int32), 1)
        mass += tl.sum(tl.where(hit, tl.exp(values - best)[None, :], 0.0), 1)
    return many, mass


@jit
def find_cut(
    row, first, flat, best, low, many, heavy, top_k, top_p, total, tokens, room, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """(key of the smallest value that is kept, how many of the tokens that have it are).

    Args:
        first: keys and weights of all the row's tokens, unless it is flat
        low, many, heavy: key that the cut is not below, how many tokens are not below it, and their mass
        total: the mass that top_p is a share of, negative if that is what top_k and `low` leave
        tokens, room: scratch for `_raise`
    """
    cut = low
    ties = tl.full((), 2147483647, tl.int32)
    for stage in range(2):  # top_k, then top_p; a loop, so that the code is there only once
        target = tl.where(stage == 0, -1.0, top_p * tl.where(total < 0.0, heavy, total))
        count = tl.where(stage == 0, top_k, tl.where(top_p < 1.0, 0, 2147483647))
        low, many, heavy, above, lighter = _raise(
            row, first, flat, best, cut, many, heavy, count, target, tokens, room, GROUP, TILE
        )
        # Of equals, the last that is needed to reach the target is the last that is kept.
        weight = tl.maximum(tl.exp(unordered(low) - best), 2e-38)  # a normal number
        needed = tl.minimum(tl.ceil((target - lighter) / weight), 1e9).to(tl.int32)
        needed = tl.where(stage == 0, top_k - above, needed)
        needed = tl.where(many > count, needed, 2147483647)
        ties = tl.where(low == cut, tl.minimum(ties, needed), needed)
        heavy = tl.where(many > count, lighter + needed * weight, heavy)
        many = tl.minimum(many, top_k)
        cut = low
    return cut, tl.maximum(ties, 1)


@jit
def _raise(
    row, first, flat, best, low, many, heavy, count, target, tokens, room, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Raises `low` as far as `count` tokens with a mass of `target` stay at or above it, or until just they do.

    Returns:
        low; how many tokens are at or above it, and their mass; the same for those known to be above it, which are all
        of them but for one unless low has become the exact value
    """
    high = ordered(best)
    above = tl.zeros((), tl.int32)
    lighter = tl.zeros((), tl.float32)
    beyond = above  # how many tokens are above all that `first` holds, and their mass
    burden = lighter
    if flat & (many > count):
        low, high, many, heavy, beyond, burden = _narrow(row, best, low, many, heavy, count, target, room, GROUP, TILE)
        above = beyond
        lighter = burden
        if (low < high) & (many > count):  # else it is settled, and the list may have no room
            # Those at `low` itself are counted already. They may be more than `many` says, after top_k.
            found = list_tokens(row, low + 1, high, tokens, room, GROUP, TILE)
            between = (row[0], tokens, found, tl.full((), 1, tl.int32), row[4], row[5])
            first = first_tile(between, best, GROUP, TILE)
    while (low < high) & (many > count) & (many - above > 1):
        middle = low + ((high - low + 1) >> 1)
        here, mass = weigh(first, middle)
        here += beyond
        mass += burden
        enough = (here >= count) & (mass >= target)
        low = tl.where(enough, middle, low)
        many = tl.where(enough, here, many)
        heavy = tl.where(enough, mass, heavy)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, here)
        lighter = tl.where(enough, lighter, mass)
    return low, many, heavy, above, lighter


@jit
def _narrow(row, best, low, many, heavy, count, target, room, GROUP: tl.constexpr, TILE: tl.constexpr):
    """As `_raise`, but only until no more than `room` tokens are from low to high, and high is returned too."""
    high = ordered(best)
    above = tl.zeros((), tl.int32)
    lighter = tl.zeros((), tl.float32)
    part = tl.arange(0, 4) + 1  # fifths of the way from low to high
    while (low < high) & (many > count) & (many - above > room):
        # Equal steps of the value share out the tokens better than equal steps of the bits, unless it hardly differs.
        distance = unordered(high) - unordered(low)
        pivots = low + ((high - low) // 5) * part.to(tl.uint32)
        by_value = (distance < 64.0) & (distance > 0.01)
        pivots = tl.where(by_value, ordered(unordered(low) + (0.2 * distance) * part), pivots)
        pivots = tl.minimum(tl.maximum(pivots, low + 1), high)
        here, mass = weigh_each(row, best, pivots, GROUP, TILE)
        enough = (here >= count) & (mass >= target)
        low = tl.max(tl.where(enough, pivots, low), 0)
        many = tl.min(tl.where(enough, here, many), 0)
        heavy = tl.min(tl.where(enough, mass, heavy), 0)
        high = tl.min(tl.where(enough, high, pivots - 1), 0)
        above = tl.max(tl.where(enough, above, here), 0)
        lighter = tl.max(tl.where(enough, lighter, mass), 0)
    return low, high, many, heavy, above, lighter
