"""Profiles where there is no GPU: what is made of kernels' times, and the steps that would be looked at."""

from __future__ import annotations

import pytest
import torch

from labkit.bench import profile
from labkit.bench.profile import KernelTime, Span, summarise
from labkit.bench.workloads import Workload, make_workload
from labkit.config import EngineConfig
from labkit.errors import LabkitError
from labkit.llm import LLM
from labkit.models import sources


def test_kernels_by_name_and_the_gaps_between_them() -> None:
    spans = [
        Span("b", 130.0, 150.0),
        Span("a", 100.0, 120.0),
        Span("a", 140.0, 145.0),  # within b: no time is counted twice
        Span("c", 148.0, 160.0),
        Span("a", 190.0, 200.0),
    ]
    span, busy, kernels = summarise(spans, steps=2)
    assert (span, busy) == (50.0, 30.0)
    assert kernels == [KernelTime("a", 1.5, 17.5), KernelTime("b", 0.5, 10.0), KernelTime("c", 0.5, 6.0)]


def test_a_profiler_that_saw_nothing_is_no_profile() -> None:
    with pytest.raises(LabkitError, match="saw no kernel"):
        summarise([], 1)


def test_it_needs_a_gpu() -> None:
    with pytest.raises(LabkitError, match="the device is cpu"):
        profile.measure("toy", "b1", EngineConfig(device="cpu"), [])


@pytest.mark.skipif(sources._toy("toy") is None, reason="data/toy is not there")
def test_all_requests_decode_when_the_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with LLM("toy", quiet=True, device="cpu", max_model_len=256) as llm:
        profile.fill(llm.engine, make_workload("decode8", 300))
        before = llm.engine.stats()
        assert before.running == 8 and before.waiting == 0
        assert profile.timed_steps(llm.engine, torch.device("cpu")) > 0
        after = llm.engine.stats()
        assert after.steps - before.steps == profile.STEPS
        assert after.tokens_out - before.tokens_out == 8 * profile.STEPS, "a token for each and step: they all decode"


@pytest.mark.skipif(sources._toy("toy") is None, reason="data/toy is not there")
def test_requests_that_end_too_early_are_refused() -> None:
    with (
        LLM("toy", quiet=True, device="cpu", max_model_len=256) as llm,
        pytest.raises(LabkitError, match="w never has all of its requests decoding"),
    ):
        profile.fill(llm.engine, Workload("w", 0, "output", 0.0, [[1, 2], [3]], [100, 20]))
