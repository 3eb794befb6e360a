"""Random lives: whatever comes, goes, fails or runs out, blocks and answers stay right and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.cache import prefix
from labkit.engine.request import Status
from tests.unit.engine.scheduler_world import World, make_request

configs = st.fixed_dictionaries(
    {
        "scheduler": st.sampled_from(["continuous", "continuous", "static", "none"]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "admission": st.sampled_from(["optimistic", "optimistic", "reserve"]),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "block_size": st.integers(1, 4),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 12),
    }
)
# Prompts are a few stems with short ends, so that many of them share blocks.
prompts = st.builds(
    lambda stem, length, end: ([0, 1, 2, 3, 1, 0, 2, 2, 3, 1, 1, 0] if stem else [4, 4, 4, 4] * 3)[:length] + end,
    st.booleans(),
    st.integers(0, 12),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "max_tokens": st.integers(1, 10),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "eos": st.booleans(),
        "priority": st.integers(-1, 1),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
    }
)
lives = st.lists(
    st.fixed_dictionaries(
        {
            "request": requests,
            "arrives": st.integers(0, 12),
            "leaves": st.one_of(st.none(), st.none(), st.integers(0, 15)),  # steps after its arrival
            "in_flight": st.booleans(),  # it leaves while a step runs, not between two
        }
    ),
    min_size=1,
    max_size=8,
).map(lambda lives: sorted(lives, key=lambda life: life["arrives"]))
changes = st.dictionaries(  # after so many steps, to these settings
    st.integers(0, 20),
    st.fixed_dictionaries(
        {},
        optional={
            "policy": st.sampled_from(["fcfs", "priority"]),
            "enable_prefix_caching": st.booleans(),
            "max_num_batched_tokens": st.integers(1, 12),
            "max_num_seqs": st.integers(1, 5),  # or as many slots as there are
        },
    ),
    max_size=6,
)
quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def live(world: World, lives: list[dict], fails: frozenset[int] = frozenset(), changes: dict[int, dict] | None = None):
    """Let the requests come and go; then run until all have ended, and check."""
    families = [make_request(number, **life["request"]) for number, life in enumerate(lives)]
    tokens = sum(seq.num_prompt_tokens + seq.max_tokens for family in families for seq in family)
    changes = changes or {}
    last = max([*changes, *(life["arrives"] + (life["leaves"] or 0) for life in lives)])
    for now in range(last + 1):
        leaving = []
        for life, family in zip(lives, families, strict=True):
            if life["arrives"] == now:
                world.add(family)
            if life["leaves"] is not None and life["arrives"] + life["leaves"] == now:
                for seq in family:
                    if life["in_flight"]:
                        leaving.append(seq)
                    else:
                        world.scheduler.finish(seq, "abort")
        if fields := changes.get(now):
            world.change(**fields | {"max_num_seqs": min(world.slots, fields.get("max_num_seqs", world.slots))})
        world.check_blocks()
        flying = len(world.flights)
        if world.step(tuple(leaving), fail=now in fails) is None and not flying:
            assert not world.scheduler.waiting and not world.scheduler.running
    world.run(most=2 * tokens)
    world.check_idle()


def smallest_pool(lives: list[dict], block_size: int) -> int:
    return max(-(-(len(li["request"]["prompt"]) + li["request"]["max_tokens"] - 1) // block_size) for li in lives)


@pytest.mark.parametrize("behind", [0, 1, 2])
@quick
@given(configs, lives, st.integers(0, 6))
def test_blocks_and_answers_stay_right(behind, config, lives, more_blocks):
    """Also when the host is behind: who ends, leaves or is preempted while steps run harms nobody."""
    world = World(smallest_pool(lives, config["block_size"]) + more_blocks, behind, **config)
    live(world, lives)
    if config["policy"] == "fcfs" and config["scheduler"] != "static":
        check_nobody_was_overtaken(world)


def check_nobody_was_overtaken(world: World) -> None:
    admitted = [e["req"] for e in world.events if e["ev"] == "admit"]
    numbers = {seq.id: seq.number for seq in world.sequences}
    first_choices = [numbers[req] for req in dict.fromkeys(admitted) if req.endswith("/0")]
    assert first_choices == sorted(first_choices)


@pytest.mark.parametrize("behind", [0, 1])
@settings(quick, max_examples=80)
@given(configs, lives, st.integers(0, 6), st.frozensets(st.integers(0, 15), max_size=4))
def test_a_failed_step_ends_its_sequences_only(behind, config, lives, more_blocks, fails):
    world = World(smallest_pool(lives, config["block_size"]) + more_blocks, behind, **config)
    live(world, lives, fails)


@pytest.mark.parametrize("behind", [0, 1, 2])
@quick
@given(configs, lives, st.integers(0, 6), changes)
def test_settings_may_change_between_any_two_steps(behind, config, lives, more_blocks, changes):
    world = World(smallest_pool(lives, config["block_size"]) + more_blocks, behind, **config)
    live(world, lives, changes=changes)


@pytest.mark.parametrize("buckets", [1, 2])
@settings(quick, max_examples=80, suppress_health_check=[*HealthCheck])
@given(configs, lives, st.integers(0, 6))
def test_colliding_hashes_change_nothing(monkeypatch, buckets, config, lives, more_blocks):
    """All blocks have the same hash, or one of two: fewer hits, never a wrong one."""
    monkeypatch.setattr(prefix, "hash_block", lambda parent, tokens: sum(tokens) % buckets)
    world = World(smallest_pool(lives, config["block_size"]) + more_blocks, **config | {"enable_prefix_caching": True})
    live(world, lives)


@settings(quick, max_examples=60)
@given(configs, st.lists(requests, min_size=2, max_size=6), st.integers(0, 3))
def test_the_first_in_rank_always_runs_on(config, some, more_blocks):
    """It is never preempted while it is first, and computes something in every step unless decodes take it all."""
    config |= {"scheduler": "continuous", "admission": "optimistic", "enable_chunked_prefill": True}
    world = World(smallest_pool([{"request": r} for r in some], config["block_size"]) + more_blocks, **config)
    for number, request in enumerate(some):
        world.add(make_request(number, **request))
    while world.scheduler.waiting or world.scheduler.running:
        first = min(world.scheduler.running, key=world.scheduler._rank, default=None)
        world.step()
        if first is not None:
            assert first.status is not Status.WAITING
            decodes_only = sum(length for _, _, length in world.steps[-1]) == config["max_num_batched_tokens"]
            assert decodes_only or first.id in {name for name, _, _ in world.steps[-1]}
    world.check_idle()
