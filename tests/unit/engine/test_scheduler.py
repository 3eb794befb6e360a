"""The scheduler, one rule at a time. The world checks blocks, contents and answers along the way."""

from __future__ import annotations

import random
import time

import pytest

from labkit.cache import blocks
from labkit.engine import scheduler as scheduler_module
from labkit.engine.request import Status
from labkit.engine.scheduler import Scheduler, chunk
from tests.unit.engine.scheduler_world import World, alone, make_request

P = random.Random(1).choices(range(6), k=64)


def add(world: World, number: int, prompt: list[int], max_tokens: int = 8, **fields):
    return world.add(make_request(number, prompt, max_tokens, **fields))


def one(world: World, number: int, prompt: list[int], max_tokens: int = 8, **fields):
    return add(world, number, prompt, max_tokens, **fields)[0]


def lengths(world: World) -> list[dict[str, int]]:
    """Of each step: who computed how many tokens."""
    return [{name.removesuffix("/0"): length for name, _, length in step} for step in world.steps]


def events(world: World, *kinds: str) -> list[dict]:
    return [e for e in world.events if e["ev"] in kinds]


# ------------------------------------------------------------------------------------------- the budget


@pytest.mark.parametrize(
    ("uncomputed", "left", "chunked", "want"),
    [(30, 16, True, 16), (3, 16, True, 3), (5, 2, True, 2), (30, 16, False, 30), (5, 4, False, 0), (5, 5, False, 5)],
)
def test_chunk(uncomputed, left, chunked, want):
    assert chunk(uncomputed, left, 16, chunked) == want


def test_a_prompt_is_split_by_what_the_decodes_leave():
    world = World(64, max_num_batched_tokens=10)
    one(world, 0, P[:6], 4)
    world.step()
    one(world, 1, P[20:40], 2)
    world.run()
    assert lengths(world) == [{"r0": 6}, {"r0": 1, "r1": 9}, {"r0": 1, "r1": 9}, {"r0": 1, "r1": 2}, {"r1": 1}]
    world.check_idle()


def test_prompts_share_a_step():
    world = World(64, max_num_batched_tokens=16)
    for number, length in enumerate((5, 6, 7)):
        one(world, number, P[number * 8 :][:length], 2)
    world.step()
    assert lengths(world) == [{"r0": 5, "r1": 6, "r2": 5}]


def test_more_decodes_than_budget():
    world = World(64, max_num_batched_tokens=2)
    for number in range(4):
        one(world, number, [number], 4)
    world.run()
    world.check_idle()


def test_at_most_max_num_seqs_run():
    world = World(64, max_num_seqs=2)
    for number in range(5):
        one(world, number, [number], 3)
    world.step()
    assert [seq.number for seq in world.scheduler.running] == [0, 1] and len(world.scheduler.waiting) == 3
    world.run()
    world.check_idle()


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole():
    world = World(64, max_num_batched_tokens=10, enable_chunked_prefill=False)
    for number, length in enumerate((6, 5, 2)):
        one(world, number, P[number * 8 :][:length], 2)
    world.run()
    assert lengths(world) == [{"r0": 6}, {"r0": 1, "r1": 5, "r2": 2}, {"r1": 1, "r2": 1}], "and nobody overtakes it"


def test_without_chunks_a_prompt_over_the_budget_has_a_step_of_its_own():
    world = World(64, max_num_batched_tokens=10, enable_chunked_prefill=False)
    one(world, 0, P[:4], 5)
    world.step()
    one(world, 1, P[20:40], 2)
    one(world, 2, P[:3], 1)
    world.run()
    assert lengths(world)[:3] == [{"r0": 4}, {"r1": 20}, {"r0": 1, "r1": 1, "r2": 3}]
    world.check_idle()


def test_without_chunks_decodes_go_on_while_a_long_prompt_has_no_room():
    world = World(8, max_num_batched_tokens=8, enable_chunked_prefill=False)
    one(world, 0, P[:9], 16)
    world.step()
    late = one(world, 1, P[20:44], 2)
    for _ in range(4):
        world.step()
    assert late.status is Status.WAITING and lengths(world)[1:] == [{"r0": 1}] * 4
    world.run()
    world.check_idle()


# ------------------------------------------------------------------------------------------- the prefix cache


def test_equal_prompts_in_one_step():
    """A block counts as cached once it is computed, not when it is handed out."""
    world = World(64, block_size=16, max_num_batched_tokens=512)
    three = [one(world, number, prompt) for number, prompt in enumerate([P[:40], P[:40], P[:45]])]
    world.step()
    assert lengths(world) == [{"r0": 40, "r1": 40, "r2": 45}]
    assert [seq.num_cached_tokens for seq in three] == [0, 0, 0]
    world.run()
    world.check_idle()
    assert world.pool.num_cached == 3, "two of the first copy, and the third block of the longest"


def test_a_prompt_of_exactly_two_blocks_sent_again():
    world = World(64, block_size=16, max_num_batched_tokens=512)
    cached = []
    for number, max_tokens in enumerate((8, 8, 1)):
        cached.append(one(world, number, P[:32], max_tokens))
        world.run()
    reader = one(world, 3, P[:32], 20)
    world.step()
    world.step()
    second = one(world, 4, P[:32], 8)
    world.step()
    assert [seq.num_cached_tokens for seq in [*cached, reader, second]] == [0, 16, 16, 16, 16]
    assert world.pool.num_users(reader.block_table[0]) == 2 and reader.block_table[1] != second.block_table[1]
    world.run()
    world.check_idle()
    assert (world.scheduler.prefix_cache_queries, world.scheduler.prefix_cache_hits) == (160, 64)


def test_a_block_is_found_only_after_the_step_that_fills_it_is_booked():
    world = World(64, block_size=4, max_num_batched_tokens=6)
    one(world, 0, P[:12], 1)
    world.step()
    assert len(world.scheduler.prefix) == 1, "six tokens fill one block of four"
    world.run()
    assert len(world.scheduler.prefix) == 3


def test_output_is_found_too():
    world = World(64)
    first = one(world, 0, P[:6], 8)
    world.run()
    follow_up = one(world, 1, first.prompt_token_ids + first.output_token_ids + [1], 2)
    world.run()
    assert follow_up.num_cached_tokens == 12, "of 14 tokens, 13 were computed: three full blocks"
    world.check_idle()


def test_scoring_a_prompt_reads_nothing_but_leaves_its_blocks():
    world = World(64)
    for number, logprobs in enumerate((None, 1, None)):
        seq = one(world, number, P[:13], 2, prompt_logprobs=logprobs)
        world.run()
        assert seq.num_cached_tokens == (12 if number == 2 else 0)
    world = World(64)
    one(world, 0, P[:13], 2, prompt_logprobs=1)
    world.run()
    assert world.scheduler.prefix_cache_queries == 0
    one(world, 1, P[:13], 2)
    world.run()
    assert world.scheduler.prefix_cache_hits == 12


def test_without_prefix_caching_nothing_is_kept():
    world = World(64, enable_prefix_caching=False)
    for number in range(2):
        seq = one(world, number, P[:13], 2)
        world.run()
    assert seq.num_cached_tokens == world.scheduler.prefix_cache_queries == world.pool.num_cached == 0
    assert not events(world, "hit")


def test_eviction_takes_the_end_of_a_chain():
    world = World(6)
    one(world, 0, P[:13], 1)
    world.run()
    assert (world.pool.num_cached, world.pool.num_free) == (3, 3)
    one(world, 1, [3] * 15, 1)
    world.run()
    assert len(events(world, "evict")) == 1
    again = one(world, 2, P[:13], 1)
    world.run()
    assert again.num_cached_tokens == 8
    world.check_idle()


# ------------------------------------------------------------------------------------------- blocks run out


def test_the_latest_gives_way_and_comes_back_first():
    world = World(7, max_num_batched_tokens=32, max_num_seqs=2)
    old, young, late = one(world, 0, P[:9], 16), one(world, 1, P[30:39], 16), one(world, 2, [2], 2)
    while not young.num_preemptions:
        step = world.step()
    assert step.admitted == [], "it does not come back in the step in which it went"
    assert old.num_preemptions == 0 and young.status is Status.WAITING and world.scheduler.waiting == [young, late]
    assert (young.num_computed, young.slot, young.block_table, young.token_on_device) == (0, None, [], False)
    assert world.scheduler.preempted == 1
    drawn = len(young.output_token_ids)
    world.run()
    assert drawn > 1
    assert young.num_cached_tokens == 0, "what it found of its own blocks afterwards does not count"
    assert [e["cached"] for e in events(world, "admit") if e["req"] == "r1/0"][1] > 0
    assert len([e for e in events(world, "first_token") if e["req"] == "r1/0"]) == 1
    world.check_idle()


def test_one_that_ranks_last_gives_way_to_nobody_but_itself():
    """In the fourth step it needs a third block; the other one keeps its two."""
    world = World(4, enable_prefix_caching=False)
    old, young = one(world, 0, P[:5], 4), one(world, 1, P[30:36], 8)
    for _ in range(4):
        world.step()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert lengths(world)[3] == {"r0": 1}
    world.run()
    world.check_idle()


def test_priority_decides_who_starts_and_who_gives_way():
    world = World(7, policy="priority", max_num_seqs=2)
    late_but_urgent = {"priority": -1}
    one(world, 0, P[:9], 16)
    world.step()
    lazy = one(world, 1, P[10:19], 16, priority=5)
    urgent = one(world, 2, P[30:39], 16, **late_but_urgent)
    world.step()
    assert urgent.status is Status.RUNNING and lazy.status is Status.WAITING
    world.run()
    assert urgent.num_preemptions == 0 and world.sequences[0].num_preemptions >= 1
    world.check_idle()


def test_nobody_overtakes_the_head_that_has_no_room():
    world = World(8)
    one(world, 0, P[:20], 8)
    world.step()
    head, small = one(world, 1, P[30:50], 2), one(world, 2, [1], 2)
    world.step()
    assert head.status is small.status is Status.WAITING
    world.run()
    world.check_idle()


def test_reserve_admits_what_fits_in_the_worst_case():
    """7 + 6 - 1 = 12 tokens are 3 blocks of 4: three of them fill a pool of 9, and one more token each does not fit."""
    for max_tokens, together in ((6, 3), (7, 2)):
        world = World(9, admission="reserve", max_num_batched_tokens=64)
        for number in range(4):
            one(world, number, [number] * 7, max_tokens)
        world.step()
        assert len(world.scheduler.running) == together
        world.run()
        assert world.scheduler.preempted == 0
        world.check_idle()


def test_the_last_token_needs_no_block():
    world = World(1)
    one(world, 0, P[:4], 1)
    one(world, 1, P[:3], 2)
    world.run()
    assert world.scheduler.preempted == 0
    world.check_idle()


# ------------------------------------------------------------------------------------------- static and none


def test_nobody_joins_a_static_batch():
    world = World(64, scheduler="static", max_num_seqs=2)
    for number, max_tokens in enumerate((2, 5, 2, 2)):
        one(world, number, [number], max_tokens)
    world.run()
    together = [set(step) for step in lengths(world)]
    assert together == [{"r0", "r1"}] * 2 + [{"r1"}] * 3 + [{"r2", "r3"}] * 2
    world.check_idle()


def test_a_static_batch_that_exceeds_the_budget_starts_over_several_steps():
    world = World(64, scheduler="static", max_num_seqs=2, max_num_batched_tokens=5)
    for number in range(3):
        one(world, number, [number] * 5, 3)
    world.run()
    assert lengths(world)[:3] == [{"r0": 5}, {"r0": 1, "r1": 4}, {"r0": 1, "r1": 1}]
    assert "r2" not in {name for step in lengths(world)[:5] for name in step}


def test_a_preempted_member_of_a_static_batch_joins_it_again():
    world = World(5, scheduler="static", max_num_seqs=2, enable_prefix_caching=False)
    first = [one(world, number, P[number * 9 :][:7], 12) for number in range(2)]
    one(world, 2, [1], 2)
    while not all(seq.status is Status.FINISHED for seq in first):
        world.step()
        assert "r2" not in lengths(world)[-1]
    assert first[1].num_preemptions > 0
    world.run()
    world.check_idle()


def test_none_runs_one_at_a_time():
    world = World(64, scheduler="none")
    for number in range(3):
        add(world, number, [number] * 3, 3, n=2)
    world.run()
    assert all(len(step) == 1 for step in world.steps) and len(world.steps) == 18
    world.check_idle()


# ------------------------------------------------------------------------------------------- several choices


@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_the_prompts_full_blocks(caching):
    world = World(64, enable_prefix_caching=caching)
    leader, *others = add(world, 0, P[:12], 4, n=3)
    world.step()
    assert lengths(world) == [{"r0": 12}], "the others wait until the prompt is computed"
    world.step()
    assert world.pool.num_in_use == 6, "two shared blocks; the third of each, whose last token they compute themselves"
    assert all(seq.num_cached_tokens == 8 and seq.block_table[:2] == leader.block_table[:2] for seq in others)
    assert world.pool.num_users(leader.block_table[0]) == 3
    world.run()
    world.check_idle()


def test_others_pass_choices_that_wait_for_their_prompt():
    world = World(64, max_num_batched_tokens=8)
    add(world, 0, P[:12], 2, n=2)
    world.step()
    one(world, 1, [4], 2)
    world.step()
    assert lengths(world)[1] == {"r0": 4, "r1": 1}


@pytest.mark.parametrize("end", ["finish", "cancel", "preempt"])
def test_choices_do_not_wait_for_ever(end):
    world = World(64, max_num_batched_tokens=4, enable_prefix_caching=False)
    leader, other = add(world, 0, P[:12], 4, n=2)
    world.step()
    if end == "preempt":
        world.scheduler._preempt(leader)
        assert not world.scheduler._waits_for_leader(other)
    else:
        world.scheduler.finish(leader, "abort" if end == "cancel" else "stop")
    world.run()
    assert other.output_token_ids == alone(other)


# ------------------------------------------------------------------------------------------- ends from outside


def test_blocks_and_slot_of_a_cancelled_sequence_stay_until_its_step_is_booked():
    world = World(4, max_num_seqs=2, enable_prefix_caching=False)
    seq = one(world, 0, P[:8], 4)
    world.trace.step = 1
    step = world.scheduler.schedule()
    slot = seq.slot
    world.scheduler.finish(seq, "abort")
    assert world.pool.num_in_use == 2 and seq.slot == slot and not world.scheduler.running
    assert world.scheduler.book(step, [3]) == []
    assert seq.output_token_ids == [] and seq.finish_reason == "abort"
    assert world.pool.num_in_use == 0 and seq.slot is None
    one(world, 1, P[:8], 4)
    world.run()
    assert world.sequences[1].num_cached_tokens == 0, "a cancelled step's blocks are not entered"


def test_a_waiting_or_running_sequence_ends_at_once():
    world = World(64, max_num_seqs=1)
    running, waiting = one(world, 0, P[:8]), one(world, 1, P[:8])
    world.step()
    world.scheduler.finish(waiting, "abort")
    world.scheduler.finish(running, "stop", "END")
    world.scheduler.finish(running, "abort")  # too late
    assert (running.finish_reason, running.stop_reason, waiting.finish_reason) == ("stop", "END", "abort")
    assert world.pool.num_in_use == 0 and running.finished_time is not None
    world.check_blocks()
    assert [e["ev"] for e in events(world, "finish", "cancel")] == ["cancel", "finish"]


def test_a_stop_token_is_the_reason_and_ends_it():
    world = World(64)
    seq = one(world, 0, P[:8], 30)
    stop = alone(seq)[3]
    world.scheduler.finish(seq, "abort")
    seq = one(world, 0, P[:8], 30, stop_token_ids=[stop])
    world.run()
    assert (seq.finish_reason, seq.stop_reason) == ("stop", stop) and seq.output_token_ids[-1] == stop


def test_a_failed_step_leaves_nothing_behind():
    world = World(64)
    one(world, 0, P[:8])
    world.step(fail=True)
    assert world.pool.num_free == 64 and len(world.scheduler.prefix) == 0
    one(world, 1, P[:8])
    world.run()
    world.check_idle()


# ------------------------------------------------------------------------------------------- trace, seams, speed


def test_the_trace_of_a_life():
    world = World(64)
    one(world, 0, P[:9], 5)
    world.run()
    one(world, 1, P[:9], 1)
    world.run()
    told = [(e["ev"], e.get("blocks")) for e in world.events]
    assert told == [
        ("alloc", [0, 1, 2]),
        ("admit", [0, 1, 2]),
        ("first_token", None),
        ("alloc", [3]),
        ("finish", None),
        ("free", [0, 1, 2, 3]),
        ("hit", [0, 1]),
        ("alloc", [3]),
        ("admit", [0, 1, 3]),
        ("first_token", None),
        ("finish", None),
        ("free", [0, 1, 3]),
    ]
    assert events(world, "hit")[0]["tokens"] == events(world, "admit")[1]["cached"] == 8


def test_a_plain_function_can_stand_in_for_pick(monkeypatch):
    monkeypatch.setattr(Scheduler, "pick", lambda waiting: min(waiting, key=lambda seq: seq.num_prompt_tokens))
    world = World(64, max_num_seqs=1)
    for number, length in enumerate((9, 2, 5)):
        one(world, number, P[:length], 1)
    world.run()
    assert [e["req"] for e in events(world, "admit")] == ["r1/0", "r2/0", "r0/0"]


def test_other_functions_can_stand_in_for_chunk_and_the_pool(monkeypatch):
    class CountingPool(blocks.BlockPool):
        taken = 0

        def take(self, count: int) -> list[int]:
            CountingPool.taken += count
            return super().take(count)

    monkeypatch.setattr(scheduler_module, "chunk", lambda uncomputed, left, budget, chunked: min(uncomputed, left, 3))
    monkeypatch.setattr(blocks, "BlockPool", CountingPool)
    world = World(64)
    one(world, 0, P[:7], 1)
    world.run()
    assert lengths(world) == [{"r0": 3}, {"r0": 3}, {"r0": 1}] and CountingPool.taken == 2


def test_a_step_of_eight_streams_costs_little():
    world = World(1000, block_size=16, max_num_batched_tokens=512)
    for number in range(8):
        one(world, number, P[:40], 300)
    world.step()
    costs = []
    for _ in range(100):
        begin = time.perf_counter()
        step = world.scheduler.schedule()
        world.scheduler.book(step, [1] * 8)
        costs.append(time.perf_counter() - begin)
    assert sorted(costs)[50] < 0.2e-3
