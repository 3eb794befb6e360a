"""A 5-gram model over the toy's tokens: what counting alone can do. Interpolated Kneser-Ney, one discount.

    p_n(w | h) = max(c(h w) - D, 0) / c(h) + D t(h) / c(h) · p_{n-1}(w | h')        p_0 = 1 / vocabulary

c counts n-grams of the text at the highest order; below, the different tokens seen in front of the n-gram. t(h) is how
many different tokens follow h, h' is h without its first token. Source: Chen and Goodman, "An Empirical Study of
Smoothing Techniques for Language Modeling", 1998. An n-gram is one number, BITS a token, so tables are sorted arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BITS = 12  # ids are below 4096; five of them fit into 64 bits
DISCOUNT = 0.75
Ids = NDArray[np.uint64]


class Table:
    """Sorted keys with a number each; 0 for a key that is not there."""

    def __init__(self, keys: Ids, counts: NDArray[np.int64]):
        self._keys, self._counts = keys, counts

    def get(self, wanted: Ids) -> NDArray[np.float64]:
        at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return np.where(self._keys[at] == wanted, self._counts[at], 0).astype(np.float64)


def grams(tokens: NDArray[np.uint16], order: int) -> Ids:
    """Every run of `order` tokens as a number, the last token lowest."""
    count = max(0, len(tokens) - order + 1)
    out = np.zeros(count, dtype=np.uint64)
    for i in range(order):
        out = (out << np.uint64(BITS)) | tokens[i : i + count].astype(np.uint64)
    return out


class Ngram:
    def __init__(self, tokens: NDArray[np.uint16], vocab_size: int, order: int = 5):
        if vocab_size > 1 << BITS:
            raise ValueError(f"vocab_size is {vocab_size}; at most {1 << BITS} fit")
        self.vocab_size = vocab_size
        self.order = order
        self._levels: list[tuple[Table, Table, Table]] = []  # from order 1 up: counts, sums and kinds of contexts
        keys, counts = np.unique(grams(tokens, order), return_counts=True)
        for size in range(order, 0, -1):
            contexts, first, kinds = np.unique(keys >> np.uint64(BITS), return_index=True, return_counts=True)
            sums = np.add.reduceat(counts, first)
            self._levels.insert(0, (Table(keys, counts), Table(contexts, sums), Table(contexts, kinds)))
            # One order down, an n-gram counts once for each different token in front of it.
            keys, counts = np.unique(keys & np.uint64((1 << BITS * (size - 1)) - 1), return_counts=True)

    def bits(self, tokens: NDArray[np.uint16], first: int) -> float:
        """Bits of tokens[first:], each after those before it in the row."""
        chance = np.full(len(tokens) - first, 1 / self.vocab_size)
        places = np.arange(first, len(tokens))
        for size, (counts, sums, kinds) in enumerate(self._levels, start=1):
            able = places >= size - 1
            keys = grams(tokens, size)[places[able] - (size - 1)]
            context = keys >> np.uint64(BITS)
            total, different = sums.get(context), kinds.get(context)
            seen = total > 0
            lower = chance[able]
            higher = (np.maximum(counts.get(keys) - DISCOUNT, 0) + DISCOUNT * different * lower) / np.maximum(total, 1)
            chance[able] = np.where(seen, higher, lower)
        return float(-np.log2(chance).sum())
