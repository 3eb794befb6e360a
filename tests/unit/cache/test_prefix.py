"""The hash chain alone: what is found, what never is."""

from __future__ import annotations

import pytest

from labkit.cache import prefix
from labkit.cache.prefix import PrefixCache, hash_block

A = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SAME_HASH = pytest.mark.parametrize("name", [lambda parent, tokens: 0, lambda parent, tokens: hash(tokens)])


def enter(cache: PrefixCache, tokens: list[int], blocks: list[int]) -> list[bool]:
    """Enter a prompt's full blocks, one after another."""
    size = cache.block_size
    parents = [None, *blocks]
    return [cache.enter(b, tokens[i * size : (i + 1) * size], parents[i]) for i, b in enumerate(blocks)]


def test_the_longest_chain_is_found():
    cache = PrefixCache(2)
    assert cache.lookup(A) == []
    assert enter(cache, A, [10, 11, 12]) == [True] * 3
    assert cache.lookup(A) == [10, 11, 12]
    assert cache.lookup([*A[:4], 0, 0, 0]) == [10, 11]
    assert cache.lookup([0, *A[1:]]) == []


@pytest.mark.parametrize(("length", "found"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 3)])
def test_the_last_token_is_never_covered(length, found):
    cache = PrefixCache(2)
    enter(cache, A, [10, 11, 12])
    assert cache.lookup(A[:length]) == [10, 11, 12][:found]


def test_equal_tokens_behind_another_beginning_are_another_block():
    cache = PrefixCache(2)
    enter(cache, [1, 1, 7, 7], [10, 11])
    enter(cache, [2, 2, 7, 7], [20, 21])
    assert cache.lookup([1, 1, 7, 7, 0]) == [10, 11]
    assert cache.lookup([2, 2, 7, 7, 0]) == [20, 21]
    assert cache.lookup([7, 7, 0]) == []


def test_the_order_of_tokens_counts():
    assert hash_block(0, (1, 2)) != hash_block(0, (2, 1)) != hash_block(1, (2, 1))


def test_the_first_of_two_equal_blocks_keeps_the_entry():
    cache = PrefixCache(2)
    enter(cache, A, [10, 11])
    assert enter(cache, A, [20, 21, 22]) == [False, False, True], "22 has no twin, and its parent's contents are known"
    assert cache.lookup(A) == [10, 11, 22] and len(cache) == 3


def test_a_removed_block_is_not_found_nor_what_lies_behind_it():
    cache = PrefixCache(2)
    enter(cache, A, [10, 11, 12])
    cache.remove(11)
    assert cache.lookup(A) == [10] and len(cache) == 2
    assert cache.enter(21, A[2:4], 10)
    assert cache.lookup(A) == [10, 21, 12], "computed again, the block joins the two ends"


def test_a_block_that_is_used_anew_does_not_stand_for_its_old_contents():
    """20 is a twin of 10; then it is given back, gets contents that collide, and a child."""
    cache = PrefixCache(2)
    enter(cache, [1, 1], [10])
    enter(cache, [1, 1], [20])
    assert not cache.enter(20, [9, 9], 99), "its parent is not known"
    assert not cache.enter(30, [5, 5], 20)
    assert cache.lookup([1, 1, 5, 5, 0]) == [10]


@SAME_HASH
def test_another_chain_with_the_same_hash_is_not_a_hit(monkeypatch, name):
    monkeypatch.setattr(prefix, "hash_block", name)
    cache = PrefixCache(2)
    enter(cache, [1, 1, 7, 7], [10, 11])
    assert enter(cache, [2, 2, 7, 7], [20, 21])[1] is False
    assert cache.lookup([2, 2, 7, 7, 0]) in ([], [20])
    assert cache.lookup([1, 1, 7, 7, 0]) in ([10], [10, 11])


def test_the_same_hash_for_equal_tokens_behind_an_evicted_parent(monkeypatch):
    """The parent of 11 is gone; another block took its place in the table. 11 must not be found behind that one."""
    monkeypatch.setattr(prefix, "hash_block", lambda parent, tokens: hash(tokens) if 7 in tokens else 1)
    cache = PrefixCache(2)
    enter(cache, [1, 1, 7, 7], [10, 11])
    cache.remove(10)
    assert cache.enter(20, [2, 2], None)
    assert cache.lookup([2, 2, 7, 7, 0]) == [20]
    cache.remove(20)
    assert cache.enter(12, [1, 1], None)
    assert cache.lookup([1, 1, 7, 7, 0]) == [12, 11]


def test_chains_are_compared_up_to_their_beginning(monkeypatch):
    """12 was entered behind 1 1 5 5; behind 2 2 5 5 its hash, its tokens and its parent's tokens are the same."""
    monkeypatch.setattr(prefix, "hash_block", lambda parent, tokens: hash(tokens))
    cache = PrefixCache(2)
    enter(cache, [1, 1, 5, 5, 7, 7], [10, 11, 12])
    cache.remove(11)
    enter(cache, [2, 2, 5, 5], [20, 21])
    assert cache.lookup([2, 2, 5, 5, 7, 7, 0]) == [20, 21]


def test_forged_tokens_with_a_known_hash():
    """Python's hash of -1 and -2 is the same, so these two blocks collide by nature."""
    assert hash_block(0, (-1, 5)) == hash_block(0, (-2, 5))
    cache = PrefixCache(2)
    enter(cache, [-1, 5], [10])
    assert cache.lookup([-2, 5, 0]) == []
    assert enter(cache, [-2, 5], [20]) == [False]
    assert cache.lookup([-1, 5, 0]) == [10]
