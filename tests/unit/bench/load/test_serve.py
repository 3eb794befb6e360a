from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from labkit.bench.commands import app
from labkit.bench.load import serve, servers
from labkit.bench.load.arrivals import Closed, Poisson, Recorded, Row
from labkit.bench.load.client import Target
from labkit.bench.load.plots import draw_load
from labkit.bench.load.record import Objective
from labkit.bench.load.serve import Settings, measure, plan
from labkit.bench.load.servers import Place, Remote, Server, as_options, start_vllm
from labkit.bench.load.summary_csv import write_serve
from labkit.bench.peers import NotMeasuredError
from labkit.bench.reading import markdown, read_record
from labkit.bench.record import write_json
from labkit.errors import LabkitError
from tests.unit.bench.load.fake_server import FakeServer, running
from tests.unit.bench.load.samples import a_serve_record, a_soak_record

PLACE = Place("toy", "toy", "float32", 8, 256, 0.4, False, "dev-key", "completions")
runner = CliRunner()


def test_a_server_behind_a_url_from_the_command_to_the_table(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with running(FakeServer(per_chunk=16)) as server:
        command = ["serve", "--url", server.url, "--model", "plain", "--workload", "chat", "--processes", "1"]
        command += "--concurrency 1 --concurrency 3 --requests 3 --repeats 1 --ttft-ms 60000".split()
        result = runner.invoke(app, [*command, "--out", str(path)])
    assert result.exit_code == 0, result.output
    record = read_record(path)
    assert isinstance(record, type(a_serve_record()))
    assert [run.load for run in record.runs] == ["chat, 1 client", "chat, 3 clients"]
    assert [(run.summary.whole, run.summary.good_share) for run in record.runs] == [(3, 1.0), (3, 1.0)]
    check = record.token_checks["server"]
    assert check.listed == check.usage and check.listed > check.chunks > 0
    assert record.runs[0].summary.queue_ms is not None, "out of the server's /metrics"
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) - 1, "none again, but for the warm-up's one whose tokens are counted"
    assert result.stdout == markdown(path) + "\n"
    assert draw_load(record, tmp_path / "r.png").stat().st_size > 5000


def test_a_server_that_counts_wrongly_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "choice", lambda self, body, count: choice(self, body, count + 1))
    with running(FakeServer()) as server, pytest.raises(LabkitError, match="would be wrong"):
        measure(Settings("plain", server.url, ignore_eos=False, workloads=("http1",), requests=1), lambda _: None)


choice = FakeServer.choice


def test_a_server_that_refuses_is_an_error_that_says_how() -> None:
    with running(FakeServer()) as server, pytest.raises(LabkitError, match=r"http 503.*message.*no"):
        measure(Settings("busy", server.url, workloads=("http1",), requests=1), lambda _: None)


def test_a_plan_has_a_warm_up_and_other_prompts_each_time() -> None:
    settings = Settings("m", repeats=2, seed=5, requests=6)
    warm_up, *loads = plan(settings, "http64", Closed(4), 1000)
    assert (len(warm_up.asks), warm_up.clients, [len(load.asks) for load in loads]) == (4, 4, [6, 6])
    assert [load.seed for load in loads] == [5, 6] and loads[0].asks != loads[1].asks
    assert plan(settings, "chat", Poisson(3.0), 1000)[0].clients == 16


def test_all_engines_get_the_same_loads_in_turn_and_then_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FakeServer(per_chunk=64)) as server:
        made: list[object] = []

        def start(name: str) -> object:
            def started(place: Place, *_: object) -> Remote:
                made.append(place)
                return Remote(name, "fake", Target(server.url, "plain"))

            return started

        monkeypatch.setattr(serve, "start_ours", start("labkit"))
        monkeypatch.setattr(serve, "start_vllm", start("vllm"))
        settings = Settings("toy", workloads=("http1",), requests=1, repeats=2, vllm=True, memory_share=0.4)
        record = measure(settings, lambda _: None)
    assert [(run.engine, run.seed) for run in record.runs] == [("labkit", 0), ("vllm", 0), ("vllm", 1), ("labkit", 1)]
    assert [run.order for run in record.runs] == [0, 1, 2, 3]
    assert [(place.max_num_seqs, place.memory_share, place.prefix_caching) for place in made] == [(1, 0.4, False)] * 2  # type: ignore[attr-defined]
    assert (record.model, record.comparisons[0]["workload"], record.dtype) == ("toy", "http1", "float32")


def test_what_is_measured_is_kept_after_each_load() -> None:
    kept: list[list[str]] = []
    with running(FakeServer(per_chunk=64)) as server:
        settings = Settings("plain", server.url, ignore_eos=False, workloads=("http1", "http2"), requests=2, repeats=1)
        record = measure(settings, lambda _: None, lambda record: kept.append([run.load for run in record.runs]))
    first, second = (run.load for run in record.runs)
    assert kept == [[first], [first, second]] and first != second


def test_vllm_that_is_not_there_is_told() -> None:
    with pytest.raises(NotMeasuredError, match="not measured: vllm is not installed"):
        start_vllm(PLACE)


def test_vllm_gets_the_same_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(servers.metadata, "version", lambda _: "0.24.0")
    monkeypatch.setattr(servers, "Server", lambda *args: seen.extend(args))
    start_vllm(PLACE)
    name, how, target, command, ready, environment = seen
    assert (name, ready, target.url.rpartition(":")[0]) == ("vllm", "/health", "http://127.0.0.1")  # type: ignore[attr-defined]
    for option in ("--dtype=float32", "--max-num-seqs=8", "--gpu-memory-utilization=0.4", "--no-enable-prefix-caching"):
        assert option in command and option in how  # type: ignore[operator]
    assert environment["VLLM_API_KEY"] == "dev-key"  # type: ignore[index]
    with pytest.raises(NotMeasuredError, match="GGUF"):
        start_vllm(Place(**{**vars(PLACE), "model": "m.gguf"}))


def test_options() -> None:
    fields = {"max_num_seqs": 8, "cuda_graphs": False, "batch_invariant": True, "quantization": None}
    assert as_options(fields) == ["--max-num-seqs=8", "--no-cuda-graphs", "--batch-invariant"]


def test_a_server_that_cannot_start_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(LabkitError, match="ended while it started; its last words:\nno such model"):
        Server("x", "", Target("http://127.0.0.1:9", "m"), command, "/ready")


def test_closing_ends_a_servers_children_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SECONDS_TO_END", 0.5)  # the child is not told, and has to be killed
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-m', 'http.server', sys.argv[1]]).wait()"
    port = servers.free_port()
    server = Server("x", "", Target(f"http://127.0.0.1:{port}", "m"), [sys.executable, "-c", child, str(port)], "/")
    family = server.family()
    assert len(family) == 2
    server.close()
    psutil.wait_procs(family, 5)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family) and server.family() == []
    server.close()


def test_the_summary_is_a_csv_with_a_line_a_run(tmp_path: Path) -> None:
    table = write_serve(a_serve_record(), tmp_path / "r.json")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (table.name, len(rows)) == ("r.csv", 2)
    assert [(row["engine"], row["tok_s"], row["ttft_ms_p99"], row["errors"]) for row in rows] == [
        ("labkit", "2000.0", "10.0", "1"),
        ("vllm", "1000.0", "20.0", "1"),
    ]


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    write_json(a_serve_record(), path)
    text = markdown(path)
    rates, times = "2,000 | 4,000 | 0.50", "5.0 / 10.0 | 1.0 / 2.0 | 1.0 / 2.0 | 100 / 1,234 | – / –"
    assert f"| http64 | labkit | {rates} | {times} | 50% | 1 of 2: http 503 |" in text
    assert "TTFT 200 ms" in text and "labkit gives 2.0 of vllm's tokens" in text
    assert "40 tokens counted one by one in 38 chunks, 40 by usage" in text and "vllm lists no tokens" in text
    assert "25% of a core" in text and "take more" not in text
    write_json(a_soak_record(), path)
    text = markdown(path)
    assert "| answers are right | **no** | 1 wrong |" in text and "Wrong: alone 'a', now 'b'." in text


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--peer", "ollama"], "ollama"),
        (["--api", "grpc"], "grpc"),
        (["--url", "http://x", "--offline"], "without"),
        (["--concurrency", "2", "--rate", "1"], "exclude"),
        (["--burst", "4"], "goes with"),
        (["--out", "x.csv"], ".json"),
        (["--engine", "speed=2"], "FIELD=VALUE"),
        (["--engine", "max_num_seqs=0"], "max_num_seqs"),
    ],
)
def test_wrong_arguments(args: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["serve", *args])
    assert result.exit_code == 2 and told in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "how",
    [
        {"workloads": ("chat",)},
        {"workloads": ("http2", "http3")},
        {"workloads": ("http2",), "api": "chat"},
    ],
)
def test_what_the_offline_engine_cannot_be_compared_under(how: dict[str, Any]) -> None:
    with pytest.raises(LabkitError, match="closed loops of one size"):
        measure(Settings("toy", offline=True, requests=2, **how), lambda _: None)


def test_a_load_longer_than_the_model() -> None:
    arrivals = (Recorded("r", (Row(0.0, 5000, 1),)),)
    with pytest.raises(LabkitError, match=r"chat, as in r: needs 5001 tokens, the model has 2048"):
        measure(Settings("toy", workloads=("chat",), arrivals=arrivals, objective=Objective()), lambda _: None)
