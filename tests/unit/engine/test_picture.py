"""The picture of a moment against the scheduler's own books, and its bounds."""

from __future__ import annotations

import msgspec
import pytest

from labkit.engine import picture as pictures
from labkit.engine.picture import CACHED, FREE, IN_USE, OTHERS, SHARED, take_picture
from tests.unit.engine.scheduler_world import World, make_request

PROMPT = [1, 2, 3, 4, 5, 0, 1, 2, 3]


def busy_world(requests: int = 3, num_blocks: int = 32, **config) -> World:
    """One has ended and left cached blocks; the others share its beginning."""
    world = World(num_blocks, **config)
    world.add(make_request(0, PROMPT, 1))
    world.run()
    for number in range(1, requests + 1):
        world.add(make_request(number, [*PROMPT, number], 5))
    for _ in range(2):
        world.step()
    return world


def look(world: World):
    return take_picture(world.scheduler, world.trace, [])


@pytest.mark.parametrize("requests", [0, 1, 3])
def test_every_block_is_what_it_is(requests):
    world = busy_world(requests)
    picture, pool = look(world), world.pool
    holders: dict[int, list[str]] = {}
    for seq in world.scheduler.running:
        for block in seq.block_table:
            holders.setdefault(block, []).append(seq.id)
    for block, (state, owner) in enumerate(zip(picture.states, picture.owners, strict=True)):
        names = holders.get(block, [])
        if names:
            assert state == (SHARED if len(names) > 1 else IN_USE)
            assert picture.requests[owner - 1][0] == names[0], "the first in rank"
        else:
            assert owner == 0 and state == (CACHED if block in pool.cached() else FREE)
    assert SHARED in picture.states or requests < 2


@pytest.mark.parametrize("most", [1, 5, 16, 31, 32])
def test_of_a_large_pool_a_cell_is_several_blocks(monkeypatch, most):
    world = busy_world()
    fine = look(world)
    monkeypatch.setattr(pictures, "MOST_CELLS", most)
    coarse = look(world)
    each = coarse.blocks_per_cell
    assert len(coarse.states) == len(coarse.owners) == -(-32 // each) <= most
    assert list(coarse.states) == [max(fine.states[i : i + each]) for i in range(0, 32, each)]
    for cell, owner in enumerate(coarse.owners):
        owners = {own for own in fine.owners[cell * each : (cell + 1) * each] if own}
        assert owner == min(owners, default=0)


def test_of_a_large_batch_only_the_first_have_names(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_NAMES", 2)
    picture = look(busy_world(5))
    assert len(picture.requests) == 2 and set(picture.owners) == {0, 1, 2, OTHERS}


def test_more_users_than_a_byte_holds():
    world = busy_world(0)
    block = next(iter(world.pool.cached()))
    world.pool.share([block] * 300)
    assert look(world).states[block] == SHARED


def test_the_last_steps(monkeypatch):
    world = busy_world()
    steps = []
    for number in range(80):
        prefill = [[f"p{i}", 0, 4] for i in range(number)]
        steps.append({"step": number, "ev": "step", "prefill": prefill, "decode": ["a", "b"], "ms": 1.0})
        world.trace.events.append(steps[-1])
        world.trace.events.append({"ev": "free", "blocks": [1]})
    got = look(world)
    assert [step["step"] for step in got.steps] == list(range(80 - pictures.MOST_STEPS, 80))
    assert all(len(s["prefill"]) + len(s["decode"]) <= pictures.MOST_IN_STEP for s in got.steps)
    assert [len(s["prefill"]) + len(s["decode"]) + s["more"] for s in got.steps] == [s["step"] + 2 for s in got.steps]
    assert steps[-1]["prefill"] == [[f"p{i}", 0, 4] for i in range(79)], "the trace itself is left alone"
    monkeypatch.setattr(pictures, "MOST_EVENTS", 10)
    assert len(look(world).steps) == 5


def test_its_size_is_bounded():
    """The largest there can be, as an event: a busy server's page gets so much twice a second at most."""
    world = World(9000, block_size=1, max_num_seqs=300, max_num_batched_tokens=9000)
    for number in range(300):
        world.add(make_request(1_000_000 + number, [1, number % 7, number // 7, 2], 5))
    for _ in range(3):
        world.scheduler.book(step := world.scheduler.schedule(), [1] * len(step.chunks))
    names = [seq.id for seq in world.scheduler.running]
    for number in range(60):
        world.trace.emit("step", prefill=[[name, 0, 4] for name in names], decode=names, ms=1.0 + number, free_blocks=0)
    picture = take_picture(world.scheduler, world.trace, [])
    assert len(msgspec.json.encode(picture)) < 80_000
