"""The block pool alone: states, order, and what it refuses."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from labkit.cache.blocks import BlockPool


def numbers(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_in_use


def test_take_share_and_give_back():
    pool = BlockPool(4)
    assert numbers(pool) == (4, 0, 0)
    a = pool.take(3)
    assert len(set(a)) == 3 and numbers(pool) == (1, 0, 3)
    pool.share(a[:2])
    pool.give_back(a)
    assert numbers(pool) == (2, 0, 2), "two blocks have another user"
    pool.give_back(a[:2])
    assert numbers(pool) == (4, 0, 0)


def test_a_kept_block_is_cached_and_can_be_shared_again():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.keep(block)
    pool.give_back([block])
    assert numbers(pool) == (2, 1, 0) and pool.num_available == 3
    pool.share([block])
    assert numbers(pool) == (2, 0, 1) and pool.num_users(block) == 1
    pool.give_back([block])
    assert numbers(pool) == (2, 1, 0), "it is still worth keeping"


def test_free_blocks_go_first_then_the_end_of_the_oldest_chain():
    evicted = []
    pool = BlockPool(6, on_evict=evicted.append)
    old, new = pool.take(2), pool.take(2)
    for block in old + new:
        pool.keep(block)
    pool.give_back(old)
    pool.give_back(new)
    pool.take(2)
    assert evicted == [], "two were free"
    assert pool.take(3) == [old[1], old[0], new[1]] == evicted
    assert numbers(pool) == (0, 1, 5)


def test_an_evicted_block_is_not_kept_any_more():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.keep(block)
    pool.give_back([block])
    pool.give_back(pool.take(1))
    assert numbers(pool) == (1, 0, 0)


def test_using_a_chain_again_makes_it_young():
    pool = BlockPool(2)
    a, b = pool.take(2)
    for block in (a, b):
        pool.keep(block)
        pool.give_back([block])
    pool.share([a])
    pool.give_back([a])
    assert pool.take(1) == [b]


def test_taking_too_many_takes_none():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 available"):
        pool.take(3)
    assert numbers(pool) == (2, 0, 1)


def test_giving_back_twice_is_noticed():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(blocks)


def test_cost_does_not_grow_with_the_pool():
    """O(1) a block: 2,000 rounds of take, keep, give back and evict on a million blocks, far from a scan of them."""
    pool = BlockPool(1_000_000)
    everything = pool.take(1_000_000)
    for block in everything:
        pool.keep(block)
    pool.give_back(everything)
    begin = time.perf_counter()
    for _ in range(2_000):
        pool.give_back(pool.take(2))
    assert time.perf_counter() - begin < 1, "one scan of a million blocks takes about 10 ms"


class Pool(RuleBasedStateMachine):
    """Against a plain model: a dict of users and a list of cached blocks in order of their last use."""

    def __init__(self):
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(6, on_evict=self.evicted.append)
        self.users: dict[int, int] = {}
        self.kept: set[int] = set()
        self.cached: list[int] = []
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 7))
    def take(self, count):
        free = 6 - len(self.users) - len(self.cached)
        if count > free + len(self.cached):
            with pytest.raises(ValueError):
                self.pool.take(count)
            return
        self.evicted.clear()
        blocks = self.pool.take(count)
        gone = [self.cached.pop(0) for _ in range(max(0, count - free))]
        self.kept -= set(gone)
        assert self.evicted == gone
        assert len(set(blocks)) == count and not set(blocks) & (set(self.users) | set(self.cached))
        self.users |= dict.fromkeys(blocks, 1)
        self.held.append(blocks)

    @rule(data=st.data())
    def share(self, data):
        if self.held or self.cached:
            blocks = data.draw(st.sampled_from(self.held + [[block] for block in self.cached]))
            self.pool.share(blocks)
            for block in blocks:
                self.users[block] = self.users.get(block, 0) + 1
            self.cached = [block for block in self.cached if block not in blocks]
            self.held.append(list(blocks))

    @rule(data=st.data())
    def keep(self, data):
        if self.users:
            block = data.draw(st.sampled_from(sorted(self.users)))
            self.pool.keep(block)
            self.kept.add(block)

    @rule(data=st.data())
    def give_back(self, data):
        if self.held:
            blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.pool.give_back(blocks)
            for block in reversed(blocks):
                self.users[block] -= 1
                if self.users[block] == 0:
                    del self.users[block]
                    if block in self.kept:
                        self.cached.append(block)

    @invariant()
    def adds_up(self):
        assert numbers(self.pool) == (6 - len(self.users) - len(self.cached), len(self.cached), len(self.users))
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_in_use == self.pool.num_blocks
        assert all(self.pool.num_users(block) == self.users.get(block, 0) for block in range(6))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
