"""Settings that change while the scheduler runs, one at a time. The trace says what each did."""

from __future__ import annotations

import random

import pytest

from labkit.config import EngineConfig
from labkit.engine.settings import Settings
from labkit.errors import RequestError
from tests.unit.engine.scheduler_world import World, make_request

P = random.Random(1).choices(range(6), k=64)
LAUNCHED = EngineConfig(max_num_batched_tokens=64, max_num_seqs=4)


def admitted(world: World) -> list[str]:
    return [e["req"].removesuffix("/0") for e in world.events if e["ev"] == "admit"]


def test_another_policy_sorts_who_waits_and_who_runs():
    world = World(64, max_num_seqs=1)
    for number, priority in enumerate([0, 3, 1, 2]):
        world.add(make_request(number, P[number : number + 4], 2, priority=priority))
    world.step()
    world.change(policy="priority")
    world.run()
    assert admitted(world) == ["r0", "r2", "r3", "r1"]
    world.check_idle()


def test_another_policy_chooses_another_victim():
    world = World(4, max_num_seqs=2)
    world.add(make_request(0, P[:7], 6, priority=1))
    world.add(make_request(1, P[20:27], 6, priority=0))
    world.step()
    world.change(policy="priority")
    world.run()
    assert [e["req"] for e in world.events if e["ev"] == "preempt"] == ["r0/0"]
    world.check_idle()


def test_a_smaller_budget_holds_from_the_next_step_on():
    world = World(64)
    world.add(make_request(0, P[:40], 1))
    world.step()
    world.change(max_num_batched_tokens=5)
    world.run()
    assert [step[0][2] for step in world.steps] == [16, 5, 5, 5, 5, 4]


def test_with_fewer_seats_nobody_is_sent_away_and_nobody_joins():
    world = World(64)
    for number in range(3):
        world.add(make_request(number, P[number : number + 4], 2 + number))
    world.step()
    world.change(max_num_seqs=1)
    world.add(make_request(3, P[9:12], 2))
    world.run()
    assert [len(step) for step in world.steps] == [3, 3, 2, 1, 1, 1]
    assert world.scheduler.preempted == 0
    world.check_idle()


def test_the_prefix_cache_off_and_on():
    world = World(64)

    def hits(number: int) -> list[int]:
        world.add(make_request(number, P[:13], 1))
        world.run()
        return [e["tokens"] for e in world.events if e["ev"] == "hit" and e["req"] == f"r{number}/0"]

    assert hits(0) == []
    world.change(enable_prefix_caching=False)
    assert hits(1) == []
    assert world.scheduler.prefix_cache_queries == 13, "nobody asked"
    world.change(enable_prefix_caching=True)
    assert hits(2) == [12], "what was kept before is still true"
    world.check_idle()


def test_a_twin_that_was_filled_while_the_cache_was_off_is_no_parent():
    """Block 1 is a twin of block 0, is freed, and gets other tokens unseen: what follows is no child of block 0."""
    world = World(4)
    world.add(make_request(0, P[:6], 1))
    world.add(make_request(1, P[:6], 1))  # in the same step, so with blocks of its own
    world.run()
    twin = world.scheduler.prefix._by_block.keys() - {e.block for e in world.scheduler.prefix._by_hash.values()}
    assert twin, "this test needs a twin"
    world.change(enable_prefix_caching=False)
    world.add(make_request(2, [5, 5, 5, 4], 9))
    world.step()
    assert set(world.scheduler.running[0].block_table) & twin, "and somebody else in its place"
    world.change(enable_prefix_caching=True)
    world.run()
    answer = world.sequences[2].output_token_ids
    world.add(make_request(3, [*P[:4], *answer[:4], 0], 1))  # were it one, this would find it
    world.run()
    assert [e for e in world.events if e["ev"] == "hit" and e["req"] == "r3/0" and e["tokens"] > 4] == []
    world.check_idle()


@pytest.mark.parametrize(
    "wrong",
    [{"policy": "best"}, {"max_num_seqs": 5}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 65}],
)
def test_what_cannot_be_is_refused_by_name(wrong):
    with pytest.raises(RequestError) as caught:
        Settings(**wrong).check(LAUNCHED)
    assert caught.value.param == next(iter(wrong)) and str(next(iter(wrong.values()))) in str(caught.value)


def test_what_changes():
    Settings(max_num_seqs=4, max_num_batched_tokens=1).check(LAUNCHED)
    assert Settings.of(LAUNCHED).changes(LAUNCHED) == {} == Settings().changes(LAUNCHED)
    assert Settings(policy="priority", max_num_seqs=4).changes(LAUNCHED) == {"policy": "priority"}
