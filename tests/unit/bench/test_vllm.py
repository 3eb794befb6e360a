"""The peer vLLM, with a module in its place that keeps what it was told."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from labkit.bench.peers import NotMeasuredError, Terms, open_peers
from labkit.bench.peers.vllm import ENVIRONMENT, VLLM
from labkit.bench.workloads import Workload

GPU = torch.device("cuda", 0)


class FakeLLM:
    """Gives back as many tokens as were asked for, less `short_by`."""

    short_by = 0

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.options = model, options
        self.environment = dict(os.environ)
        self.asked: list[tuple[Any, Any]] = []
        self.ended = 0
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._end))

    def _end(self) -> None:
        self.ended += 1

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.asked.append((prompts, params))
        answers = [tuple(range(p.max_tokens - self.short_by)) for p in params]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)], metrics=None) for tokens in answers]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fake = ModuleType("vllm")
    vars(fake).update(__version__="0.24.0", LLM=FakeLLM, SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for key in ENVIRONMENT:
        monkeypatch.setenv(key, "")  # so that what is set meanwhile is put back
        monkeypatch.delenv(key)
    return fake


@pytest.fixture
def terms(tmp_path: Path) -> Terms:
    return Terms(tmp_path, torch.bfloat16, GPU, longest=2049, streams=256, memory_share=0.35)


def test_it_gets_our_terms_and_an_engine_that_is_spawned(module: ModuleType, terms: Terms) -> None:
    (peer,), told = open_peers(["vllm"], terms)
    assert isinstance(peer, VLLM) and peer.dtype == "bfloat16"
    llm = peer._llm
    assert llm.model == str(terms.path)
    assert llm.options == {
        "dtype": "bfloat16",
        "max_model_len": 2304,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.35,
        "enable_prefix_caching": False,
    }
    assert llm.environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert llm.environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert llm.environment["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert told["vllm"].startswith("0.24.0, ") and "gpu_memory_utilization 0.35" in told["vllm"]


def test_what_the_user_set_stays(module: ModuleType, terms: Terms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    assert VLLM(terms)._llm.environment["VLLM_LOGGING_LEVEL"] == "INFO"


def test_a_run_is_ids_in_and_the_tokens_that_came_back(module: ModuleType, terms: Terms) -> None:
    peer = VLLM(terms)
    answer = peer.run(Workload("w", 0, "output", 0.6, [[5, 6], [7]], [3, 2]))
    assert answer.token_ids == [[0, 1, 2], [0, 1]]
    assert answer.first_token_s == answer.finished_s == [None, None] and answer.seconds > 0
    ((prompts, params),) = peer._llm.asked
    assert prompts == [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}]
    assert [vars(p) for p in params] == [
        {"temperature": 0.6, "max_tokens": count, "ignore_eos": True, "detokenize": False} for count in (3, 2)
    ]
    peer._llm.short_by = 1
    assert peer.run(Workload("w", 0, "output", 0.6, [[5]], [3])).token_ids == [[0, 1]], "counted, not believed"


def test_closing_ends_its_process(module: ModuleType, terms: Terms) -> None:
    peer = VLLM(terms)
    llm = peer._llm
    peer.close()
    assert llm.ended == 1


@pytest.mark.parametrize("error", [ValueError("free memory is less than desired"), RuntimeError("engine core failed")])
def test_a_model_that_it_cannot_load_is_told(
    module: ModuleType, terms: Terms, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(module, "LLM", fail)
    found, told = open_peers(["vllm"], terms)
    assert found == []
    assert told["vllm"] == f"not measured: it could not load {terms.path.name}: {error}"


def test_a_gguf_file_is_refused(module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match="GGUF"):
        VLLM(Terms(tmp_path / "m.gguf", torch.bfloat16, GPU, 64, 1))


def test_without_vllm_it_says_how_to_get_it(terms: Terms, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ENVIRONMENT:
        monkeypatch.setenv(key, "x")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(NotMeasuredError, match=r"not measured: .*pip install vllm"):
        VLLM(terms)
