from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from labkit.bench.machine import describe_machine
from labkit.bench.reading import read_record
from labkit.bench.record import Memory, WorkloadRecord, compare, ratios, summarise, write_record
from tests.unit.bench.samples import MIB, a_record, a_run


def test_round_trip(tmp_path: Path) -> None:
    record = a_record()
    write_record(record, tmp_path / "deep" / "r.json")
    assert read_record(tmp_path / "deep" / "r.json") == record


def test_the_json_has_every_repeat_and_every_request(tmp_path: Path) -> None:
    write_record(a_record(), tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    runs = data["workloads"][0]["runs"]
    assert [run["engine"] for run in runs] == ["labkit"] * 3 + ["transformers"] * 3
    times = {"prompt_tokens": 48, "output_tokens": 128, "arrival_s": 0.0, "first_token_s": 0.1, "finished_s": 4.0}
    assert runs[0]["requests"] == [times, times]
    row = {"model": "tiny", "workload": "decode1", "tok_s": 31.0, "transformers_tok_s": 9.0, "ratio": 3.444}
    assert data["comparisons"][0] == row
    assert data["machine"]["commit"] == "0123456789abcdef" and data["machine"]["tree_clean"] is True


def test_the_csv_has_a_row_an_engine_and_workload(tmp_path: Path) -> None:
    table = write_record(a_record(), tmp_path / "r.json")
    assert table == tmp_path / "r.csv"
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["workload"], r["engine"], float(r["tok_s"]), r["labkit_over_this"]) for r in rows] == [
        ("decode1", "labkit", 31.0, ""),
        ("decode1", "transformers", 9.0, "3.444"),
        ("decode8", "labkit", 122.0, ""),
        ("decode8", "transformers", 61.0, "2.0"),
    ]


def test_a_summary_is_the_median_and_the_range() -> None:
    runs = [
        a_run("labkit", i, rate, first) for i, (rate, first) in enumerate([(40, 0.4), (10, 0.1), (30, 0.3), (20, 0.2)])
    ]
    workload = WorkloadRecord("decode1", 1, "output", 0.0, [48], [128], [*runs, a_run("peer", 4, 7.0, None)])
    ours, theirs = summarise(workload, {"labkit": "float32", "peer": "float16"}, {"peer": 0.5})
    assert (ours.tok_s, ours.tok_s_min, ours.tok_s_max, ours.repeats) == (25, 10, 40, 4)
    assert ours.first_token_s == pytest.approx(0.25)
    assert (theirs.tok_s, theirs.dtype, theirs.first_token_s, theirs.tokens_as_ours) == (7.0, "float16", None, 0.5)
    assert ours.tokens_as_ours is None


def test_a_comparison_needs_a_run_of_ours() -> None:
    workload = WorkloadRecord("b1", 1, "output", 0.6, [48], [128], [a_run("peer", 0, 7.0)])
    rows = summarise(workload, {"peer": "float32"}, {})
    assert compare("m", rows) == [] and ratios(rows) == {}


def test_two_peers_are_two_rows() -> None:
    runs = [a_run("labkit", 0, 30.0), a_run("vllm", 1, 20.0), a_run("transformers", 2, 10.0)]
    rows = summarise(
        WorkloadRecord("b1", 1, "output", 0.6, [48], [128], runs),
        dict.fromkeys("labkit vllm transformers".split(), "bfloat16"),
        {},
    )
    assert compare("m", rows) == [
        {"model": "m", "workload": "b1", "tok_s": 30.0, "vllm_tok_s": 20.0, "ratio": 1.5},
        {"model": "m", "workload": "b1", "tok_s": 30.0, "transformers_tok_s": 10.0, "ratio": 3.0},
    ]
    assert ratios(rows) == {("b1", "vllm"): 1.5, ("b1", "transformers"): 3.0}


def test_memory_kept_twice_shows() -> None:
    once = Memory(500 * MIB, 100 * MIB, 300 * MIB, 800 * MIB, 800 * MIB, 900 * MIB)
    twice = Memory(500 * MIB, 100 * MIB, 300 * MIB, 1300 * MIB, 1300 * MIB, 1400 * MIB)
    assert once.load_over_weights == 1.0 and twice.load_over_weights == 2.0


def test_this_machine_describes_itself() -> None:
    machine = describe_machine()
    assert machine.cores >= 1 and machine.ram_bytes > 1 << 28 and machine.cpu
    assert machine.packages["torch"] and "llama-cpp-python" in machine.packages
    assert machine.commit is None or len(machine.commit) == 40
