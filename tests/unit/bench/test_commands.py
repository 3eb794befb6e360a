from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.bench.commands import app, free_name
from labkit.bench.reading import tables
from labkit.bench.record import write_json, write_record
from labkit.errors import LabkitError
from tests.unit.bench.samples import a_kernel_record, a_record, a_trace

runner = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in a_trace()))
    return path


@pytest.mark.parametrize(
    ("variant", "told"), [("fast", "FIELD=VALUE"), ("speed=2", "batch_invariant"), ("max_num_seqs=0", "max_num_seqs")]
)
def test_a_variant_that_the_engine_does_not_take(variant: str, told: str) -> None:
    result = runner.invoke(app, ["offline", "--model", "toy", "--variant", variant])
    assert result.exit_code == 2 and told in result.output


def test_plot_draws_a_trace_beside_it(trace: Path) -> None:
    result = runner.invoke(app, ["plot", str(trace)])
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in trace.parent.iterdir()) == ["t.jsonl", "t.png"]
    assert result.stdout == f"wrote {trace.with_suffix('.png')}\n"


def test_plot_writes_perfettos_json_beside_it(trace: Path) -> None:
    result = runner.invoke(app, ["plot", str(trace), "--perfetto"])
    assert result.exit_code == 0, result.output
    assert sorted(p.name for p in trace.parent.iterdir()) == ["t.jsonl", "t.perfetto.json"]
    assert json.loads((trace.parent / "t.perfetto.json").read_text())["traceEvents"]


def test_plot_prints_a_records_table_and_draws_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_record(a_record(), path)
    table = tables([path]) + "\n"
    result = runner.invoke(app, ["plot", str(path), "--markdown"])
    assert (result.exit_code, result.stdout) == (0, table)
    assert not list(tmp_path.glob("*.png"))
    result = runner.invoke(app, ["plot", str(path)])
    assert (result.exit_code, result.stdout) == (0, table)
    assert (tmp_path / "r.bars.png").exists()


def test_plot_writes_the_tables_of_several_files_into_a_page(tmp_path: Path) -> None:
    files = [tmp_path / "k.json", tmp_path / "r.json"]
    write_json(a_kernel_record(), files[0])
    write_json(a_record(), files[1])
    page = tmp_path / "page.md"
    page.write_text("# A page\n<!-- measured: begin -->\n<!-- measured: end -->\n")
    result = runner.invoke(app, ["plot", "--markdown", *map(str, files), "--into", str(page)])
    assert (result.exit_code, result.stdout) == (0, f"wrote {page}\n")
    assert page.read_text() == f"# A page\n<!-- measured: begin -->\n{tables(files)}\n<!-- measured: end -->\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k.json", "page.md", "r.json"]


def test_the_share_of_the_gpu_is_smaller_beside_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(settings, say) -> object:
        seen.append((settings.peers, settings.engine.gpu_memory_utilization))
        return a_record()

    monkeypatch.setattr("labkit.bench.offline.measure", measure)
    for args in (
        [],
        ["--peer", "vllm"],
        ["--peer", "vllm", "--peer", "transformers", "--gpu-memory-utilization", "0.3"],
    ):
        assert runner.invoke(app, ["offline", "--out", str(tmp_path / "r.json"), *args]).exit_code == 0
    assert seen == [((), 0.9), (("vllm",), 0.4), (("vllm", "transformers"), 0.3)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plot", "x.json", "--perfetto"], "for a trace"),
        (["plot", "x.jsonl", "--markdown"], "for a record"),
        (["plot", "x.json", "y.jsonl", "--markdown"], "for a record"),
        (["plot", "x.json", "--into", "page.md"], "goes with --markdown"),
        (["offline", "--workload", "b7"], "'b7'"),
        (["offline", "--peer", "ollama"], "'ollama'"),
        (["offline", "--gpu-memory-utilization", "0"], "gpu_memory_utilization"),
        (["offline", "--out", "x.csv"], ".json"),
        (["offline", "--repeats", "0"], "repeats"),
        (["offline", "--dtype", "float8"], "float8"),
    ],
)
def test_wrong_arguments(args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, args)
    assert result.exit_code == 2 and message in result.output
    assert list(tmp_path.iterdir()) == [], "nothing is made for a command that is refused"


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    result = runner.invoke(app, ["plot", str(tmp_path / "no.jsonl")])
    assert isinstance(result.exception, LabkitError) and "no.jsonl" in str(result.exception)


def test_a_record_never_takes_anothers_name(tmp_path: Path) -> None:
    record = a_record()
    assert free_name(tmp_path, record).name == "cpu-offline-2026-11-30.json"
    (tmp_path / "cpu-offline-2026-11-30.json").touch()
    assert free_name(tmp_path, record).name == "cpu-offline-2026-11-30-2.json"
