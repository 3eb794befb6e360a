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
count; where all of them together are a little too light, whatever else reaches nearly the least of them may suffice.

If it does not, or if more tokens reach than the list has room for, the row is flat: every pivot means reading it all.
Then four pivots at once narrow where the cut may be, until the list has room for the tokens between; the rest of the
bisection counts those alone, on top of what is known to be above.
"""

from __future__ import annotations

from labkit.kernels.cut import candidates, find_cut, first_tile, list_tokens, ordered, unordered, weigh
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
    alone = (top_p < 1.0) & (min_p <= 0.0) & (limited == 0)
    total = tl.where(alone, mass, -1.0)
    floor = float("-inf") + tl.zeros((), tl.float32)
    if min_p > 0.0:
        floor = best + tl.log(min_p)
    reach = ordered(tl.maximum(floor, _reach(highest, best, top_p * total, top_k, limited, alone, num_groups)))

    tokens = groups + num_groups
    count = _list_groups(highest, reach, groups, num_groups, GROUPS)
    whole = (source, groups, count, tl.full((), GROUP, tl.int32), vocab, temperature)
    found = list_tokens(whole, reach, ordered(best), tokens, num_groups, GROUP, TILE)
    row = (source, tokens, tl.minimum(found, num_groups), tl.full((), 1, tl.int32), vocab, temperature)
    first = first_tile(row, best, GROUP, TILE)
    many, heavy = weigh(row, first, best, reach, GROUP, TILE)
    if (found > num_groups) | (heavy < top_p * total):
        if alone:
            # However many tokens are below this, together they are too light to matter.
            reach = ordered(best + tl.log(0.5 * (1.0 - top_p) * mass / vocab))
            count = _list_groups(highest, reach, groups, num_groups, GROUPS)
            many += vocab  # about; narrowing will tell
            heavy = mass
        row = (source, groups, count, tl.full((), GROUP, tl.int32), vocab, temperature)
        first = first_tile(row, best, GROUP, TILE)
        if not alone:
            many, heavy = weigh(row, first, best, reach, GROUP, TILE)
    keep = tl.where(limited, top_k, 2147483647)
    cut, ties = find_cut(row, first, best, reach, many, heavy, keep, top_p, total, tokens, num_groups, GROUP, TILE)
    return _race(row, k0, k1, cut, ties, GROUP, TILE)


@jit
def _reach(highest, best, target, top_k, limited, alone, num_groups):
    """A value that the last token kept by top_k is not below, and seldom far below it; for top_p alone, likely so."""
    reach = float("-inf") + tl.zeros((), tl.float32)
    keys = ordered(highest)
    low = ordered(reach)
    high = ordered(best)
    # The sign, the exponent and 7 more bits are settled after 16 pivots; a few tokens too many cost less than the rest.
    if limited:
        if top_k <= num_groups:
            while high - low > 65535:
                middle = low + ((high - low + 1) >> 1)
                enough = tl.sum((keys >= middle).to(tl.int32), 0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            reach = unordered(low)
    elif alone:
        weights = tl.exp(highest - best)
        # The mass is rounded otherwise than below; and the lightest of the maxima would bring in all that is as light.
        target = tl.minimum(target * 1.0001, tl.sum(weights, 0) * 0.99)
        while high - low > 65535:
            middle = low + ((high - low + 1) >> 1)
            enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        reach = unordered(low)
    return reach


@jit
def _list_groups(highest, reach, groups, num_groups, GROUPS: tl.constexpr):
    """Lists the groups whose maximum is not below the reach; how many they are."""
    lane = tl.arange(0, GROUPS)
    chosen = (ordered(highest) >= reach) & (lane < num_groups)
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups + order, lane, mask=chosen)
    tl.debug_barrier()  # other threads of this program read the list
    return tl.sum(chosen.to(tl.int32), 0)


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
