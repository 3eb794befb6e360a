"""Records of a load and of a soak, made by hand."""

from __future__ import annotations

from labkit.bench.load.numbers import compare
from labkit.bench.load.record import (
    Check,
    ClientCost,
    LoadRun,
    LoadSummary,
    Objective,
    Sample,
    ServeRecord,
    SoakRecord,
    Spread,
    Timing,
    TokenCheck,
)
from tests.unit.bench.samples import MACHINE


def a_load_run(engine: str, order: int, tok_s: float, ttft: float, load: str = "http64") -> LoadRun:
    """Of two requests one failed; the first token's p99 is twice its p50."""
    times = Spread(1.0, 1.5, 2.0)
    summary = LoadSummary(
        requests=2,
        whole=1,
        errors={"http 503": 1},
        seconds=1.0,
        tok_s=tok_s,
        prompt_tok_s=2 * tok_s,
        chunks_per_token=0.5,
        ttft_ms=Spread(ttft, 1.5 * ttft, 2 * ttft),
        tpot_ms=times,
        gap_ms=times,
        e2e_ms=Spread(100.0, 200.0, 1234.0),
        queue_ms=None,
        goodput_s=1.0,
        good_share=0.5,
    )
    timing = Timing(sent_s=0.0, first_s=0.1, last_s=0.9, end_s=1.0, prompt_tokens=3, output_tokens=9, chunks=5)
    failed = Timing(sent_s=0.5, end_s=0.6, prompt_tokens=3, output_tokens=0, error="http 503")
    cost = ClientCost(processes=2, cpu_share=0.25, lag_ms=0.4, late_ms=None)
    return LoadRun(engine, order, load, "64 clients", 64, 0, 0.6, summary, cost, [timing, failed])


def a_serve_record() -> ServeRecord:
    """Ours at twice the rate of vLLM's."""
    runs = [a_load_run("labkit", 0, 2000.0, 5.0), a_load_run("vllm", 1, 1000.0, 10.0)]
    return ServeRecord(
        schema=1,
        kind="serve",
        date="2026-12-01T12:00:00+00:00",
        command=["labkit", "bench", "serve"],
        machine=MACHINE,
        model="tiny",
        device="cpu",
        dtype="float32",
        api="completions",
        engine_options={"num_kv_blocks": 64},
        engines={"labkit": "0.1.0, labkit serve", "vllm": "0.24.0, its OpenAI server"},
        token_checks={"labkit": TokenCheck(4, 40, 40, 38), "vllm": TokenCheck(4, None, 40, 30)},
        objective=Objective(ttft_ms=200.0),
        runs=runs,
        comparisons=compare("tiny", runs),
    )


def a_sample(
    t: float, rss_mib: float = 100.0, fds: int = 20, threads: int = 9, tasks: int = 6, **gauges: float
) -> Sample:
    return Sample(t, 2, round(rss_mib * (1 << 20)), fds, threads, gauges, tasks)


def a_soak_record() -> SoakRecord:
    """It found one thing wrong."""
    return SoakRecord(
        schema=1,
        kind="soak",
        date="2026-12-01T12:00:00+00:00",
        command=["labkit", "bench", "soak"],
        machine=MACHINE,
        model="tiny",
        device="cpu",
        engine_options={},
        clients=64,
        seconds=300.0,
        seed=0,
        outcomes={"leave: in the middle": 3, "read: streamed": 12},
        wrong=["alone 'a', now 'b'"],
        samples=[a_sample(0.0)],
        checks=[Check("answers are right", False, "1 wrong"), Check("memory is flat", True, "+0.1 MiB")],
    )
