from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from labkit.bench import offline
from labkit.bench.ours import clocked
from labkit.bench.peers import NotMeasuredError
from labkit.bench.reading import read_record
from labkit.bench.record import write_record
from labkit.bench.workloads import WORKLOADS, Answer, Workload, make_workload
from labkit.config import EngineConfig
from labkit.errors import LabkitError
from labkit.models import sources

CPU = torch.device("cpu")


class Canned:
    """An engine that gives the same token over and over, in no time that matters."""

    dtype = "float32"
    how = "canned"

    def __init__(self, name: str, token: int = 7, short_by: int = 0, refuses: str = "") -> None:
        self.name, self.token, self.short_by, self.refuses = name, token, short_by, refuses
        self.lengths: list[int] = []

    def run(self, workload: Workload) -> Answer:
        if workload.name == self.refuses:
            raise NotMeasuredError("not measured: it cannot")
        self.lengths.append(max(workload.max_tokens))
        tokens = [[self.token] * (count - self.short_by) for count in workload.max_tokens]
        requests = len(tokens)
        return Answer(2.0, tokens, [0.5] * requests, [2.0] * requests)

    def close(self) -> None:
        pass


def test_the_order_turns_round_half_way() -> None:
    assert "".join(offline.turns(4, "abc")) == "abcabccbacba"
    assert "".join(offline.turns(3, "ab")) == "ababba"
    assert "".join(offline.turns(1, "ab")) == "ab"


def test_a_session_over_two_engines() -> None:
    ours, peer = Canned("labkit"), Canned("peer")
    workloads = [make_workload("decode8", 1000), make_workload("prefill512", 1000)]
    records, rows = offline._run_all([ours, peer], workloads, 2, {"peer": "canned"}, 16, lambda line: None)
    assert ours.lengths == [16, 128, 128, 1, 1, 1], "each workload is warmed up with a short one first"
    runs = [(run.engine, run.order) for record in records for run in record.runs]
    assert runs == list(zip(["labkit", "peer", "peer", "labkit"] * 2, itertools.count()))
    assert [(row.workload, row.engine, row.tok_s) for row in rows] == [
        ("decode8", "labkit", 8 * 128 / 2),
        ("decode8", "peer", 8 * 128 / 2),
        ("prefill512", "labkit", 512 / 2),  # prompt tokens count here
        ("prefill512", "peer", 512 / 2),
    ]
    assert [row.tokens_as_ours for row in rows] == [None, 1.0, None, 1.0]
    assert records[0].runs[0].requests[0].output_tokens == 128


def test_on_a_gpu_every_workload_is_warmed_up_whole() -> None:
    longest = max(max(make_workload(name, 1000).max_tokens) for name in WORKLOADS)
    assert offline.WARM_UP["cuda"] >= longest > offline.WARM_UP["cpu"]


def test_sampled_tokens_are_not_compared() -> None:
    workloads = [make_workload("b1", 1000)]
    _, rows = offline._run_all([Canned("labkit"), Canned("peer", 8)], workloads, 1, {"peer": ""}, 16, lambda line: None)
    assert [row.tokens_as_ours for row in rows] == [None, None]


def test_a_peer_that_refuses_a_workload_is_left_out_of_it_and_told() -> None:
    peers = {"peer": "canned"}
    workloads = [make_workload("decode1", 1000), make_workload("prefill512", 1000)]
    _, rows = offline._run_all(
        [Canned("labkit"), Canned("peer", refuses="decode1")], workloads, 1, peers, 16, lambda line: None
    )
    assert [(row.workload, row.engine) for row in rows] == [
        ("decode1", "labkit"),
        ("prefill512", "labkit"),
        ("prefill512", "peer"),
    ]
    assert peers == {"peer": "canned; decode1 not measured: it cannot"}


def test_tokens_are_counted_not_believed() -> None:
    with pytest.raises(LabkitError, match="peer gave back 1016 tokens on decode8, 1024 were asked for"):
        offline._run_all(
            [Canned("labkit"), Canned("peer", short_by=1)],
            [make_workload("decode8", 1000)],
            1,
            {"peer": ""},
            16,
            lambda line: None,
        )


def test_agreement_ends_at_the_first_difference() -> None:
    ours = Answer(1.0, [[1, 2, 3, 4], [5, 6, 7, 8]], [None, None], [None, None])
    assert offline.agree(ours, ours) == 1.0
    assert offline.agree(ours, replace(ours, token_ids=[[1, 9, 3, 4], [5, 6, 7, 8]])) == 5 / 8
    assert offline.agree(ours, replace(ours, token_ids=[[0, 2, 3, 4], [0, 6, 7, 8]])) == 0.0


def test_the_engine_is_cut_to_the_workloads() -> None:
    workloads = [make_workload("decode8", 1000), make_workload("decode1", 1000)]
    config = offline.fitted(EngineConfig(block_size=16), workloads, 2048, CPU)
    assert (config.max_model_len, config.num_kv_blocks) == (177, 8 * 11)
    given = offline.fitted(EngineConfig(max_model_len=999, num_kv_blocks=500), workloads, 2048, CPU)
    assert (given.max_model_len, given.num_kv_blocks) == (999, 500)
    assert offline.fitted(EngineConfig(), workloads, 2048, torch.device("cuda")).num_kv_blocks is None


def test_a_model_too_short_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(LabkitError, match=r"^prefill512: needs 513 tokens, the model has 256"):
        offline.fitted(EngineConfig(), [make_workload("prefill512", 1000), make_workload("decode1", 1000)], 256, CPU)


def test_a_clock_around_methods_is_taken_off_again() -> None:
    class Model:
        def forward(self, x: int) -> int:
            return x + 1

    model = Model()
    with clocked(model, ("forward",)) as clock:
        assert model.forward(1) == 2
        assert clock["seconds"] > 0
        assert "forward" in vars(model)
    assert "forward" not in vars(model) and model.forward(2) == 3


@pytest.mark.skipif(sources._toy("toy") is None, reason="data/toy is not there")
def test_end_to_end_on_the_toy(tmp_path) -> None:
    variant = "enable_prefix_caching=true"
    settings = offline.Settings(
        "toy",
        ("decode1", "decode8"),
        repeats=1,
        variants={variant: {"enable_prefix_caching": True}},
        trace=tmp_path / "t.jsonl",
        command=("labkit", "bench", "offline"),
    )
    said: list[str] = []
    record = offline.measure(settings, said.append)
    write_record(record, tmp_path / "r.json")
    assert read_record(tmp_path / "r.json") == record
    assert [(row.workload, row.engine, row.dtype) for row in record.summary] == [
        ("decode1", "labkit", "float32"),
        ("decode1", variant, "float32"),
        ("decode8", "labkit", "float32"),
        ("decode8", variant, "float32"),
    ]
    assert [row.tokens_as_ours for row in record.summary] == [None, 1.0] * 2
    assert [row["ratio"] for row in record.comparisons] == [
        pytest.approx(ours.tok_s / theirs.tok_s, abs=1e-3) for ours, theirs in (record.summary[:2], record.summary[2:])
    ]
    requests = record.workloads[1].runs[0].requests
    assert [r.output_tokens for r in requests] == [128] * 8
    for r in requests:
        assert r.arrival_s is not None and r.first_token_s is not None and r.finished_s is not None
        assert r.arrival_s <= r.first_token_s < r.finished_s
    cost = record.step_cost
    assert cost is not None and cost.streams == 8 and cost.steps >= 128
    assert cost.step_ms == pytest.approx(cost.model_ms + cost.own_ms)
    assert min(cost.model_ms, cost.runner_ms, cost.scheduler_ms, cost.caller_ms) > 0
    assert record.memory is not None and record.memory.kv_bytes > 0
    assert record.engine_options["enable_prefix_caching"] is False
    assert record.engine_options["max_num_batched_tokens"] == 512, "as resolved, not as given"
    assert (tmp_path / "t.jsonl").stat().st_size > 0
    assert record.peers == {variant: f"labkit with {variant}, otherwise the same"}
    assert said[0] == "loading toy into labkit"
