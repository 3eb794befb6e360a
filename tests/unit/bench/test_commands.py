from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.bench.commands import _free_name, app
from labkit.bench.record import write_record
from labkit.bench.table import markdown
from labkit.errors import LabkitError
from tests.unit.bench.samples import a_record, a_trace

runner = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in a_trace()))
    return path


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
    table = markdown(a_record(), path.as_posix()) + "\n"
    result = runner.invoke(app, ["plot", str(path), "--markdown"])
    assert (result.exit_code, result.stdout) == (0, table)
    assert not list(tmp_path.glob("*.png"))
    result = runner.invoke(app, ["plot", str(path)])
    assert (result.exit_code, result.stdout) == (0, table)
    assert (tmp_path / "r.bars.png").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plot", "x.json", "--perfetto"], "for a trace"),
        (["plot", "x.jsonl", "--markdown"], "for a record"),
        (["offline", "--workload", "b7"], "'b7'"),
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
    assert _free_name(tmp_path, record).name == "cpu-offline-2026-11-30.json"
    (tmp_path / "cpu-offline-2026-11-30.json").touch()
    assert _free_name(tmp_path, record).name == "cpu-offline-2026-11-30-2.json"
