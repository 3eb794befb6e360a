from __future__ import annotations

import statistics

import pytest

from labkit.bench.load.arrivals import Bursts, Closed, Poisson, Recorded, Row
from labkit.bench.load.workloads import SHAPES, make_load, shape_of
from labkit.errors import LabkitError


def test_http64_is_what_the_comparison_of_servers_says() -> None:
    load = make_load("http64", requests=400)
    lengths_in, lengths_out = [len(a.prompt) for a in load.asks], [a.max_tokens for a in load.asks]
    assert (load.name, load.clients, load.temperature) == ("http64", 64, 0.6)
    assert 100 <= min(lengths_in) < 150 and 975 < max(lengths_in) <= 1024
    assert 100 <= min(lengths_out) < 120 and 490 < max(lengths_out) <= 512
    assert all(0 <= token <= 10_000 for ask in load.asks for token in ask.prompt)
    assert [len(make_load(name).asks) for name in ("http1", "http64", "http128", "http256")] == [8, 512, 512, 1024]


@pytest.mark.parametrize("name", SHAPES)
def test_a_workload_has_its_lengths_and_its_shared_beginning(name: str) -> None:
    shape = SHAPES[name]
    loads = [make_load(name, requests=300, vocab_size=500, seed=seed) for seed in (0, 1)]
    beginnings = {tuple(ask.prompt[: shape.shared]) for load in loads for ask in load.asks}
    assert len(beginnings) == 1, "shared by all, in every run"
    own = [len(ask.prompt) - shape.shared for ask in loads[0].asks]
    assert min(own) >= shape.tokens_in.low and max(own) <= shape.tokens_in.high
    assert statistics.median(own) == pytest.approx(shape.tokens_in.median, rel=0.2)  # type: ignore[union-attr]
    assert len({tuple(ask.prompt) for load in loads for ask in load.asks}) == 600, "no two prompts are the same"
    assert max(token for ask in loads[0].asks for token in ask.prompt) < 500
    assert max(load.longest for load in loads) <= 2048
    system, user = loads[0].asks[0].text
    assert (len(system.split()), len(user.split())) == (shape.shared, own[0])


def test_a_load_is_a_function_of_its_seed() -> None:
    assert make_load("chat", seed=3) == make_load("chat", seed=3) != make_load("chat", seed=4)


def test_two_loads_of_a_seed_have_the_same_lengths_and_other_prompts() -> None:
    one, eight = make_load("chat", Closed(1), 8).asks, make_load("chat", Closed(8), 8).asks
    assert [(len(a.prompt), a.max_tokens) for a in one] == [(len(a.prompt), a.max_tokens) for a in eight]
    assert not {tuple(a.prompt) for a in one} & {tuple(a.prompt) for a in eight}


def test_the_name_says_how_requests_arrive_where_the_workload_does_not() -> None:
    assert make_load("chat").name == "chat" and isinstance(make_load("chat").arrival, Poisson)
    assert make_load("chat", Closed(8)).name == "chat, 8 clients"
    assert make_load("rag", Bursts(2.0, 4), 8).name == "rag, 2/s in bursts of 4"
    assert (make_load("chat").clients, make_load("chat", Closed(8)).clients) == (None, 8)


def test_a_recording_gives_lengths_and_times() -> None:
    recorded = Recorded("r.jsonl", (Row(3.0, 30, 7), Row(3.5, 300, 9)))
    asks = make_load("chat", recorded).asks
    assert [(len(a.prompt), a.max_tokens, a.due_s) for a in asks] == [(30, 7, 0.0), (300, 9, 0.5)]
    assert asks[0].prompt == asks[1].prompt[:30], "what is shared is, as far as it goes"


@pytest.mark.parametrize("name", ["nonsense", "http0", "http", "http12345"])
def test_an_unknown_workload(name: str) -> None:
    with pytest.raises(LabkitError, match="known ones: chat"):
        shape_of(name)
