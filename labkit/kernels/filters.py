"""min_p, top_k and top_p without sorting, for Triton.

What the filters keep is a prefix of the row in order (largest first, equal ones by id). So it is given by two numbers:
the smallest value that is kept, `cut`, and how many of the tokens with exactly that value are.

Both are found by bisection on the float's bits, counting tokens or adding up probabilities at or above a pivot. Bits
make integers that are ordered as the floats are, so at most 32 pivots settle it. Not over the whole row, though:

    row        ├─ group 0 ─┼─ group 1 ─┼─ group 2 ─┼─ … ─┤     GROUP tokens each
    maxima           2.1         7.4         3.0                 left by the pass that read the row

The k-th largest of the groups' maxima is not above the k-th largest token: k groups have a token that large. So only
groups whose maximum reaches it can hold one of the k best; about k of some thousand, and they fit in the cache. top_p
alone goes the same way, with the maxima's probabilities in place of their count; if those do not suffice (a flat
distribution), every group is looked at for every pivot, which is right but slow.
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
        groups: [num_groups] int32, scratch: the groups that matter
        mass: sum of exp(value - largest value) over the row, about
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

    cut, ties = _cut(
        source, groups, count, vocab, temperature, best, mass, reach, top_p, min_p, top_k, limited, GROUP, TILE
    )
    return _race(source, groups, count, vocab, temperature, k0, k1, cut, ties, GROUP, TILE)


@jit
def _sure(highest, best, mass, top_p, min_p, top_k, limited, num_groups):
    """A value that the last token kept by top_k, or by top_p alone, is not below."""
    sure = float("-inf") + tl.zeros((), tl.float32)
    keys = ordered(highest)
    low = ordered(sure)
    high = ordered(best)
    if limited:
        if top_k <= num_groups:
            while low < high:
                middle = low + ((high - low + 1) >> 1)
                enough = tl.sum((keys >= middle).to(tl.int32), 0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            sure = unordered(low)
    elif (top_p < 1.0) & (min_p <= 0.0):
        weights = tl.exp(highest - best)
        target = top_p * mass * 1.0001  # the mass is rounded otherwise than below
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        sure = unordered(low)
    return sure


@jit
def _cut(
    source,
    groups,
    count,
    vocab,
    temperature,
    best,
    mass,
    reach,
    top_p,
    min_p,
    top_k,
    limited,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """(key of the smallest value that is kept, how many of the tokens that have it are)."""
    cut = reach
    ties = tl.full((), 2147483647, tl.int32)
    total = mass
    if limited:
        high = ordered(best)
        while cut < high:
            middle = cut + ((high - cut + 1) >> 1)
            many, _ = _weigh(source, groups, count, vocab, temperature, best, middle, GROUP, TILE)
            cut = tl.where(many >= top_k, middle, cut)
            high = tl.where(many >= top_k, high, middle - 1)
    if limited | (min_p > 0.0):
        reaching, _ = _weigh(source, groups, count, vocab, temperature, best, cut, GROUP, TILE)
        above, total = _weigh(source, groups, count, vocab, temperature, best, cut + 1, GROUP, TILE)
        if limited:
            ties = top_k - above  # more than there are if min_p cuts first
        total += tl.minimum(ties, reaching - above) * tl.exp(unordered(cut) - best)
    if top_p < 1.0:
        target = top_p * total
        low = cut
        high = ordered(best)
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            _, heavy = _weigh(source, groups, count, vocab, temperature, best, middle, GROUP, TILE)
            low = tl.where(heavy >= target, middle, low)
            high = tl.where(heavy >= target, high, middle - 1)
        _, above_mass = _weigh(source, groups, count, vocab, temperature, best, low + 1, GROUP, TILE)
        # Of equals, the last that is needed to reach the target is the last that is kept.
        weight = tl.maximum(tl.exp(unordered(low) - best), 1e-38)
        needed = tl.minimum(tl.ceil((target - above_mass) / weight), 1e9).to(tl.int32)
        ties = tl.where(low == cut, tl.minimum(ties, needed), needed)
        cut = low
    return cut, tl.maximum(ties, 1)


@jit
def _candidates(source, groups, begin, count, vocab, temperature, GROUP: tl.constexpr, TILE: tl.constexpr):
    """TILE tokens of the listed groups, from the begin-th group on, by rising id: ids, values, which of them exist."""
    lane = tl.arange(0, TILE)
    place = begin + lane // GROUP
    ids = tl.load(groups + place, mask=place < count, other=0) * GROUP + lane % GROUP
    exists = (place < count) & (ids < vocab)
    values = tl.load(source + ids, mask=exists, other=float("-inf")).to(tl.float32)
    return ids, tl.div_rn(values, temperature + tl.zeros_like(values)), exists


@jit
def _weigh(source, groups, count, vocab, temperature, best, pivot, GROUP: tl.constexpr, TILE: tl.constexpr):
    """How many tokens are at or above the pivot, and their mass."""
    many = tl.zeros((TILE,), tl.int32)
    mass = tl.zeros((TILE,), tl.float32)
    for begin in range(0, count, TILE // GROUP):
        _, values, exists = _candidates(source, groups, begin, count, vocab, temperature, GROUP, TILE)
        hit = exists & (ordered(values) >= pivot)
        many += hit.to(tl.int32)
        mass += tl.where(hit, tl.exp(values - best), 0.0)
    return tl.sum(many, 0), tl.sum(mass, 0)


@jit
def _race(source, groups, count, vocab, temperature, k0, k1, cut, ties, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The largest of value + noise among the tokens that are kept, the lowest id on a tie."""
    best = float("-inf") + tl.zeros((), tl.float32)
    winner = tl.zeros((), tl.int32)
    passed = tl.zeros((), tl.int32)
    for begin in range(0, count, TILE // GROUP):
        ids, values, exists = _candidates(source, groups, begin, count, vocab, temperature, GROUP, TILE)
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
