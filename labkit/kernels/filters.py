"""min_p, top_k and top_p without sorting, for Triton.

What the filters keep is a prefix of the row in order (largest first, equal ones by id). So it is given by two numbers:
the smallest value that is kept, `cut`, and how many of the tokens with exactly that value are.

Both are found by bisection on the float's bits, counting tokens or adding up probabilities at or above a pivot. Bits
make integers that are ordered as the floats are, so at most 32 pivots settle it. Not over the whole row, though:

    row        ├─ group 0 ─┼─ group 1 ─┼─ group 2 ─┼─ … ─┤     GROUP tokens each
    maxima           2.1         7.4         3.0                 left by the pass that read the row
    reach      ────────────────── 6.5 ────────────────────      a value that what is kept is not below
    groups                       [1]                             whose maximum reaches it, and in them
    tokens                     [5, 40]                           those that do

The k-th largest of the groups' maxima is not above the k-th largest token: k groups have a token that large. So only
groups whose maximum reaches it can hold one of the k best; about k of some thousand, with about k tokens that reach it.
Those stay in registers for all pivots. top_p alone goes the same way, with the maxima's probabilities in place of their
count; if those do not suffice (a flat distribution), every group is read for every pivot, which is right but slow.
"""

from __future__ import annotations

from labkit.kernels.gumbel import noise, noise_bits
from labkit.kernels.jit import jit, tl


@jit
def is_filtered(parameters, vocab):
    """Whether the slot's row draws among some of the tokens only."""
    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    top_p = tl.load(parameters + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(parameters + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(parameters + 6)
    return (temperature > 0.0) & ((top_p < 1.0) | (min_p > 0.0) | ((top_k > 0) & (top_k < vocab)))


@jit
def needs_mass(parameters, vocab):
    """Whether the filters ask for the mass of the whole row: only top_p does, if nothing else cuts before it."""
    top_p = tl.load(parameters + 1).to(tl.float32, bitcast=True)
    min_p = tl.load(parameters + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(parameters + 6)
    return (top_p < 1.0) & (min_p <= 0.0) & ((top_k <= 0) | (top_k >= vocab))


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
def draw_filtered(
    source,
    maxima,
    groups,
    mass,
    temperature,
    top_p,
    min_p,
    top_k,
    k0,
    k1,
    vocab,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token that one row draws.

    Args:
        source: the row [V]
        maxima: [num_groups] float32, of each group of the row
        groups: [2 × num_groups] int32, scratch: the groups that matter, then the tokens that do
        mass: sum of exp(value - largest value) over the row, about; undefined unless `needs_mass`
    """
    lane = tl.arange(0, GROUPS)
    highest = tl.div_rn(tl.load(maxima + lane, mask=lane < num_groups, other=float("-inf")), temperature)
    best = tl.max(highest, 0)
    limited = (top_k > 0) & (top_k < vocab)
    floor = float("-inf") + tl.zeros((), tl.float32)
    if min_p > 0.0:
        floor = best + tl.log(min_p)
    reach = ordered(tl.maximum(floor, _sure(highest, best, mass, top_p, min_p, top_k, limited, num_groups)))

    chosen = (ordered(highest) >= reach) & (lane < num_groups)
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups + order, lane, mask=chosen)
    count = tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # other threads of this program read the list
    row = (source, groups, count, tl.full((), GROUP, tl.int32), vocab, temperature)
    found = _list_tokens(row, reach, groups + num_groups, num_groups, GROUP, TILE)
    tl.debug_barrier()
    if found <= num_groups:
        row = (source, groups + num_groups, found, tl.full((), 1, tl.int32), vocab, temperature)
    total = tl.where(limited | (min_p > 0.0), -1.0, mass)
    cut, ties = _cut(row, best, reach, tl.where(limited, top_k, 2147483647), top_p, total, GROUP, TILE)
    return _race(row, k0, k1, cut, ties, GROUP, TILE)


@jit
def _sure(highest, best, mass, top_p, min_p, top_k, limited, num_groups):
    """A value that the last token kept by top_k, or by top_p alone, is not below, and seldom far below it."""
    sure = float("-inf") + tl.zeros((), tl.float32)
    keys = ordered(highest)
    low = ordered(sure)
    high = ordered(best)
    # The sign, the exponent and 7 more bits are settled after 16 pivots; a few tokens too many cost less than the rest.
    if limited:
        if top_k <= num_groups:
            while high - low > 65535:
                middle = low + ((high - low + 1) >> 1)
                enough = tl.sum((keys >= middle).to(tl.int32), 0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            sure = unordered(low)
    elif (top_p < 1.0) & (min_p <= 0.0):
        weights = tl.exp(highest - best)
        target = top_p * mass * 1.0001  # the mass is rounded otherwise than below
        while high - low > 65535:
            middle = low + ((high - low + 1) >> 1)
            enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        sure = unordered(low)
    return sure


@jit
def _list_tokens(row, reach, tokens, room, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Lists the ids of the tokens that are not below the reach, as far as there is room; how many they are, or more."""
    found = tl.zeros((), tl.int32)
    begin = tl.zeros((), tl.int32)
    while (begin < row[2] * row[3]) & (found <= room):
        ids, values, exists = _candidates(row, begin, GROUP, TILE)
        hit = exists & (ordered(values) >= reach)
        order = found + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(tokens + order, ids, mask=hit & (order < room))
        found += tl.sum(hit.to(tl.int32), 0)
        begin += TILE
    return found


@jit
def _candidates(row, begin, GROUP: tl.constexpr, TILE: tl.constexpr):
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
def _cut(row, best, reach, top_k, top_p, total, GROUP: tl.constexpr, TILE: tl.constexpr):
    """(key of the smallest value that is kept, how many of the tokens that have it are).

    total is the mass that top_p is a share of, negative if that is what top_k and the reach leave.
    """
    _ids, values, exists = _candidates(row, 0, GROUP, TILE)
    first = (tl.where(exists, ordered(values), 0), tl.where(exists, tl.exp(values - best), 0.0))
    many, heavy = _weigh(row, first, best, reach, GROUP, TILE)
    cut, many, heavy, above, lighter = _raise(row, first, best, reach, many, heavy, top_k, -1.0, GROUP, TILE)
    ties = tl.full((), 2147483647, tl.int32)
    if many > top_k:
        ties = top_k - above
        heavy = lighter + ties * tl.exp(unordered(cut) - best)
        many = top_k
    if top_p < 1.0:
        target = top_p * tl.where(total < 0.0, heavy, total)
        low, many, heavy, above, lighter = _raise(row, first, best, cut, many, heavy, 0, target, GROUP, TILE)
        # Of equals, the last that is needed to reach the target is the last that is kept.
        weight = tl.maximum(tl.exp(unordered(low) - best), 1e-38)
        needed = tl.minimum(tl.ceil((target - lighter) / weight), 1e9).to(tl.int32)
        ties = tl.where(low == cut, tl.minimum(ties, needed), needed)
        cut = low
    return cut, tl.maximum(ties, 1)


@jit
def _raise(row, first, best, low, many, heavy, count, target, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Raises `low` as far as `count` tokens with a mass of `target` stay at or above it, or until just they do.

    Returns:
        low; how many tokens are at or above it, and their mass; the same for those known to be above it, which are all
        of them but for one unless low has become the exact value
    """
    high = ordered(best)
    above = tl.zeros((), tl.int32)
    lighter = tl.zeros((), tl.float32)
    while (low < high) & (many > count) & (many - above > 1):
        middle = low + ((high - low + 1) >> 1)
        here, mass = _weigh(row, first, best, middle, GROUP, TILE)
        enough = (here >= count) & (mass >= target)
        low = tl.where(enough, middle, low)
        many = tl.where(enough, here, many)
        heavy = tl.where(enough, mass, heavy)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, here)
        lighter = tl.where(enough, lighter, mass)
    return low, many, heavy, above, lighter


@jit
def _weigh(row, first, best, pivot, GROUP: tl.constexpr, TILE: tl.constexpr):
    """How many tokens are at or above the pivot, and their mass; `first` holds the first TILE's keys and weights."""
    keys, weights = first
    hit = keys >= pivot
    many = hit.to(tl.int32)
    mass = tl.where(hit, weights, 0.0)
    for begin in range(TILE, row[2] * row[3], TILE):
        _ids, values, exists = _candidates(row, begin, GROUP, TILE)
        hit = exists & (ordered(values) >= pivot)
        many += hit.to(tl.int32)
        mass += tl.where(hit, tl.exp(values - best), 0.0)
    return tl.sum(many, 0), tl.sum(mass, 0)


@jit
def _race(row, k0, k1, cut, ties, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The largest of value + noise among the tokens that are kept, the lowest id on a tie."""
    best = float("-inf") + tl.zeros((), tl.float32)
    winner = tl.zeros((), tl.int32)
    passed = tl.zeros((), tl.int32)
    for begin in range(0, row[2] * row[3], TILE):
        ids, values, exists = _candidates(row, begin, GROUP, TILE)
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
