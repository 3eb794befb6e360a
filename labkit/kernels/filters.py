"""min_p, top_k and top_p without sorting the row, for Triton.

What the filters keep is a prefix of the row in order (largest first, equal ones by id). So most of the row need not be
looked at again:

    row        ├─ group 0 ─┼─ group 1 ─┼─ group 2 ─┼─ … ─┤     GROUP tokens each
    maxima           2.1         7.4         3.0                 left by the pass that read the row
    reach      ────────────────── 6.5 ────────────────────      a value that what is kept is not below
    groups                       [1]                             whose maximum reaches it, and in them
    tokens                     [5, 40]                           those that do

The k-th largest of the groups' maxima is not above the k-th largest token: k groups have a token that large. So only
groups whose maximum reaches it can hold one of the k best; about k of some thousand, with about k tokens that reach it.
So few tokens are compared each with each. That gives everyone's rank, and the probability of all before it.

top_p alone goes the same way, with the maxima's probabilities in place of their count; where all of them together are a
little too light, whatever else reaches nearly the least of them may suffice.

If the listed tokens do not suffice, or are too many to compare, the row is left to `draw_flat`: a kernel of its own, as
the code of one that holds everything does not fit the GPU's instruction caches.
"""

from __future__ import annotations

from labkit.kernels.cut import candidates, list_tokens, ordered, unordered
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
    parameters,
    k0,
    k1,
    vocab,
    num_groups,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    """The token that one row draws, or -1: `draw_flat` is to do it.

    Args:
        source: the row [V]
        maxima: [num_groups] float32, of each group of the row
        groups: [2 × num_groups + 3] int32, scratch: the groups that matter, then the tokens that do; at the end what
            `draw_flat` needs, that is how many tokens reach, the reach's key, and the mass
        mass: sum of exp(value - largest value) over the row, about; undefined unless `needs_mass`
        FEW: how many tokens are compared each with each at most
    """
    temperature = tl.load(parameters).to(tl.float32, bitcast=True)
    top_p = tl.load(parameters + 1).to(tl.float32, bitcast=True)
    alone = needs_mass(parameters, vocab)
    lane = tl.arange(0, GROUPS)
    highest = tl.load(maxima + lane, mask=lane < num_groups, other=float("-inf"))
    highest = tl.div_rn(highest, temperature + tl.zeros_like(highest))
    best = tl.max(highest, 0)
    reach = _reach(highest, best, top_p * mass, parameters, vocab, num_groups, GROUPS)

    tokens = groups + num_groups
    count = list_groups(highest, reach, groups, num_groups, GROUPS)
    whole = (source, groups, count, tl.full((), GROUP, tl.int32), vocab, temperature)
    room = tl.minimum(num_groups, TILE)
    found = list_tokens(whole, reach, ordered(best), tokens, room, GROUP, TILE)
    few = tl.minimum(found, tl.minimum(room, FEW))
    row = (source, tokens, few, tl.full((), 1, tl.int32), vocab, temperature)
    ids, values, exists = candidates(row, 0, GROUP, FEW)
    weights = tl.where(exists, tl.exp(values - best), 0.0)
    token = tl.full((), -1, tl.int32)
    if (found > few) | (alone & (tl.sum(weights, 0) < top_p * mass)):
        tl.store(tokens + num_groups, found)
        tl.store(tokens + num_groups + 1, reach.to(tl.int32, bitcast=True))
        tl.store(tokens + num_groups + 2, mass.to(tl.int32, bitcast=True))
    else:
        rank, before = _rank(ordered(values), few, best, groups, FEW)
        top_k = tl.load(parameters + 6)
        kept = exists & (rank < tl.where(top_k > 0, top_k, vocab))
        total = tl.where(alone, mass, tl.sum(tl.where(kept, weights, 0.0), 0))
        target = tl.where(top_p < 1.0, top_p * total, float("inf"))
        kept = kept & ((before < target) | (rank == 0))
        score = tl.where(kept, values + noise(noise_bits(k0, k1, ids)), float("-inf"))
        token = tl.min(tl.where(score == tl.max(score, 0), ids, vocab - 1), 0)
    return token


@jit
def _reach(highest, best, target, parameters, vocab, num_groups, GROUPS: tl.constexpr):
    """Key of a value that the last kept token is not below, and seldom far below it; for top_p alone, likely so."""
    min_p = tl.load(parameters + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(parameters + 6)
    limited = (top_k > 0) & (top_k < vocab)
    floor = float("-inf") + tl.zeros((), tl.float32)
    if min_p > 0.0:
        floor = best + tl.log(min_p)
    low = ordered(floor)
    if (limited & (top_k <= num_groups)) | needs_mass(parameters, vocab):
        weights = tl.where(limited, 1.0, tl.exp(highest - best))
        # The mass is rounded otherwise than below; and the lightest of the maxima would bring in all that is as light.
        target = tl.minimum(target * 1.0001, tl.sum(weights, 0) * 0.99)
        target = tl.where(limited, top_k.to(tl.float32), target)
        keys = ordered(highest)
        low = tl.maximum(low, ordered(tl.min(tl.where(tl.arange(0, GROUPS) < num_groups, highest, best), 0)))
        high = ordered(best)
        # From the least of the maxima, which is seldom far. Even from -inf, the sign, the exponent and 7 more bits are
        # settled after 16 pivots; a few tokens too many cost less than the rest.
        while (high > low) & (high - low > 65535):
            middle = low + ((high - low + 1) >> 1)
            enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    return low


@jit
def list_groups(highest, reach, groups, num_groups, GROUPS: tl.constexpr):
    """Lists the groups whose maximum is not below the reach; how many they are."""
    lane = tl.arange(0, GROUPS)
    chosen = (ordered(highest) >= reach) & (lane < num_groups)
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups + order, lane, mask=chosen)
    tl.debug_barrier()  # other threads of this program read the list
    return tl.sum(chosen.to(tl.int32), 0)


@jit
def _rank(keys, count, best, scratch, FEW: tl.constexpr):
    """How many of the first `count` tokens come before each in order, and their mass; keys are [FEW], by rising id."""
    lane = tl.arange(0, FEW)
    tl.store(scratch + lane, keys.to(tl.int32, bitcast=True), mask=lane < count)
    tl.debug_barrier()
    many = tl.zeros((FEW, 8), tl.int32)
    mass = tl.zeros((FEW, 8), tl.float32)
    for begin in range(0, count, 8):  # more at a time would take too many registers
        others = begin + tl.arange(0, 8)
        theirs = tl.load(scratch + others, mask=others < count, other=0).to(tl.uint32, bitcast=True)
        weights = tl.exp(unordered(theirs) - best)
        larger = theirs[None, :] > keys[:, None]
        before = larger | ((theirs[None, :] == keys[:, None]) & (others[None, :] < lane[:, None]))
        many += before.to(tl.int32)
        mass += tl.where(before, weights[None, :], 0.0)
    return tl.sum(many, 1), tl.sum(mass, 1)
