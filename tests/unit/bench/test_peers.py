from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from labkit.bench.peers import PEERS, NotMeasuredError, Terms, open_peers
from labkit.bench.peers.llama_cpp import LlamaCpp, float32_file
from labkit.bench.peers.transformers import Transformers
from labkit.bench.workloads import Workload

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 30, 2, 9], [8, 21], [40, 41, 42, 43, 44, 45, 46]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama that likes its end-of-sequence token, so that stopping early would show."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=list(range(1, 32)),
        pad_token_id=None,
    )
    path = tmp_path_factory.mktemp("tiny")
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # the usual start is so small that every answer is one token repeated
        if parameter.dim() > 1:
            parameter.data.mul_(8)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def peer(folder: Path) -> Transformers:
    return Transformers(Terms(folder, torch.float32, CPU, 64, 3))


@torch.inference_mode()
def greedy(peer: Transformers, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(peer._model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_transformers_runs_a_batch_of_different_prompts_to_full_length(peer: Transformers) -> None:
    answer = peer.run(Workload("w", 0, "output", 0.0, PROMPTS, [12, 12, 12]))
    assert answer.token_ids == [greedy(peer, prompt, 12) for prompt in PROMPTS]
    assert any(set(tokens[:-1]) & set(range(1, 32)) for tokens in answer.token_ids), "no end token was ever drawn"
    for first, last in zip(answer.first_token_s, answer.finished_s):
        assert first is not None and last is not None
        assert 0 < first < last == answer.seconds


def test_transformers_prefill_is_one_forward(peer: Transformers) -> None:
    answer = peer.run(Workload("w", 0, "prompt", 0.0, PROMPTS[:1], [1]))
    assert answer.token_ids == [greedy(peer, PROMPTS[0], 1)]


def test_transformers_refuses_different_lengths(peer: Transformers) -> None:
    with pytest.raises(NotMeasuredError, match="same length"):
        peer.run(Workload("w", 0, "output", 0.0, PROMPTS, [3, 4, 5]))


def test_a_model_that_a_peer_cannot_load_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found, told = open_peers(PEERS, Terms(tmp_path, torch.float32, CPU, 64, 1))
    assert found == [] and set(told) == {"transformers", "llama.cpp", "vllm"}
    assert all(why.startswith("not measured: ") for why in told.values())


def test_only_the_peers_that_were_asked_for_are_opened(folder: Path) -> None:
    found, told = open_peers(["vllm", "transformers"], Terms(folder, torch.float32, CPU, 64, 1))
    assert [peer.name for peer in found] == ["transformers"]
    assert told["vllm"] == "not measured: it is compared on a CUDA GPU, not on cpu"
    assert list(told) == ["transformers", "vllm"]


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_a_missing_peer_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match=r"No module named 'llama_cpp'; .*labkit\[peers\]"):
        LlamaCpp(Terms(tmp_path / "m.gguf", torch.float32, CPU, 64, 1))


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    """A GGUF file with a tensor in Q8_0, one in F32 and metadata of several kinds."""
    rng = np.random.default_rng(0)
    path = tmp_path / "m.Q8_0.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(1)
    writer.add_token_list(["<s>", "Ġa", "é"])
    writer.add_token_types([3, 1, 1])
    writer.add_layer_norm_rms_eps(1e-5)
    data = gguf.quantize(rng.standard_normal((8, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", rng.standard_normal(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_float32_file_is_the_same_model(quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    path = float32_file(quantised)
    assert path == tmp_path / "cache" / "peers" / "m.Q8_0.F32.gguf"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing unfinished is left"
    before, after = gguf.GGUFReader(quantised), gguf.GGUFReader(path)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (new.name, new.tensor_type) == (old.name, gguf.GGMLQuantizationType.F32)
        assert list(new.shape) == list(old.shape)
        np.testing.assert_array_equal(new.data, gguf.dequantize(old.data, old.tensor_type))
    changed = {"general.file_type": int(gguf.LlamaFileType.ALL_F32)}
    for name, field in before.fields.items():
        if not name.startswith("GGUF."):
            assert after.fields[name].contents() == changed.get(name, field.contents()), name
            assert after.fields[name].types == field.types, name


def test_the_float32_file_is_made_once(quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    path = float32_file(quantised)
    made = path.stat().st_mtime_ns
    assert float32_file(quantised).stat().st_mtime_ns == made


def test_llama_cpp_is_for_float32_on_the_cpu(quantised: Path) -> None:
    pytest.importorskip("llama_cpp")
    with pytest.raises(NotMeasuredError, match="in float32 on the CPU"):
        LlamaCpp(Terms(quantised, torch.bfloat16, CPU, 64, 1))
