"""Safetensors into the engine's layout: right numbers, once in memory, and refusals that name file and tensor."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from labkit.errors import ModelError
from labkit.models.checkpoint import Checkpoint, open_checkpoint
from labkit.models.layout import DecoderWeights
from tests.checkpoints import FAMILIES, config_json, edit_json, random_weights, write_checkpoint, write_weights

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return checkpoint.load(dtype, CPU)


def flat(weights: DecoderWeights) -> list[Tensor]:
    """Every tensor of the layout, in one order."""
    out = [weights.embedding, weights.norm, weights.lm_head]
    for layer in weights.layers:
        out += [value for value in vars(layer).values() if value is not None]
    return out


def same(a: DecoderWeights, b: DecoderWeights) -> bool:
    pairs = list(zip(flat(a), flat(b), strict=True))
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_where_it_belongs(family: str, tmp_path: Path) -> None:
    state = random_weights(config_json(family))
    weights = load(open_checkpoint(str(write_checkpoint(tmp_path, family))))
    assert torch.equal(weights.embedding, state[EMBEDDING]) and torch.equal(weights.lm_head, state[HEAD])
    assert torch.equal(weights.norm, state["model.norm.weight"])
    for i, layer in enumerate(weights.layers):
        mine = {name.removeprefix(f"model.layers.{i}."): t for name, t in state.items() if f"layers.{i}." in name}
        assert torch.equal(layer.qkv, torch.cat([mine[f"self_attn.{x}_proj.weight"] for x in "qkv"]))
        gate_up = torch.cat([mine["mlp.gate_proj.weight"], mine["mlp.up_proj.weight"]])
        assert torch.equal(layer.gate_up, gate_up)
        assert torch.equal(layer.output, mine["self_attn.o_proj.weight"])
        assert torch.equal(layer.down, mine["mlp.down_proj.weight"])
        assert torch.equal(layer.input_norm, mine["input_layernorm.weight"])
        assert torch.equal(layer.post_attention_norm, mine["post_attention_layernorm.weight"])
        if family == "qwen2":
            assert layer.qkv_bias is not None
            assert torch.equal(layer.qkv_bias, torch.cat([mine[f"self_attn.{x}_proj.bias"] for x in "qkv"]))
        else:
            assert layer.qkv_bias is None
        if family == "qwen3":
            assert layer.q_norm is not None and torch.equal(layer.q_norm, mine["self_attn.q_norm.weight"])
            assert layer.k_norm is not None and torch.equal(layer.k_norm, mine["self_attn.k_norm.weight"])
        else:
            assert layer.q_norm is None and layer.k_norm is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_parameters_is_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    want = sum(parameter.numel() for _, parameter in theirs.named_parameters())
    assert open_checkpoint(str(tmp_path)).num_parameters == want


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_and_wanted_dtypes(stored: torch.dtype, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, dtype=stored)))
    assert checkpoint.config.dtype == str(stored).removeprefix("torch.")
    state = random_weights(config_json())
    for wanted in (torch.float32, torch.bfloat16):
        weights = load(checkpoint, wanted)
        assert {tensor.dtype for tensor in flat(weights)} == {wanted}
        assert torch.equal(weights.embedding, state[EMBEDDING].to(stored).to(wanted))
        gate_up = weights.layers[1].gate_up
        assert torch.equal(gate_up[:96], state["model.layers.1.mlp.gate_proj.weight"].to(stored).to(wanted))


def test_dtype_comes_from_the_tensors_when_the_config_says_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, dtype=torch.bfloat16)
    edit_json(tmp_path / "config.json", torch_dtype=...)
    assert open_checkpoint(str(tmp_path)).config.dtype == "bfloat16"


def test_sharded_and_whole_are_one_model(tmp_path: Path) -> None:
    whole = load(open_checkpoint(str(write_checkpoint(tmp_path / "a"))))
    sharded = load(open_checkpoint(str(write_checkpoint(tmp_path / "b", shards=3))))
    assert not (tmp_path / "b" / "model.safetensors").exists() and same(whole, sharded)


def test_unchanged_tensors_stay_mapped_and_nothing_is_there_twice(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, **sizes)))
    process = psutil.Process()
    before = process.memory_info().rss
    weights = load(checkpoint)
    for tensor in flat(weights):
        tensor.sum()  # touches every page
    grown = process.memory_info().rss - before
    # All of it, and one layer's mapping that is not given back yet. Twice as much would mean copies beside originals.
    assert grown < 1.25 * checkpoint.num_parameters * 4
    maps = (Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else "").count("model.safetensors")
    assert maps <= 2
    del weights


# ----- tied and untied heads


def test_tied_without_a_stored_head(tmp_path: Path) -> None:
    weights = load(open_checkpoint(str(write_checkpoint(tmp_path, tie_word_embeddings=True))))
    assert weights.lm_head is weights.embedding


@pytest.mark.parametrize("field", [False, ...])
def test_untied_without_a_stored_head(field: object, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_json(tmp_path / "config.json", tie_word_embeddings=field)
    with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        open_checkpoint(str(tmp_path))


def test_tied_with_a_stored_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(open_checkpoint(str(tmp_path)))
    state = load_file(tmp_path / "model.safetensors")
    write_weights(tmp_path, {**state, HEAD: state[EMBEDDING].clone()})
    weights = load(open_checkpoint(str(tmp_path)))
    assert weights.lm_head is weights.embedding


def test_field_absent_and_head_stored_is_untied(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=...)
    assert not open_checkpoint(str(tmp_path)).config.tie_word_embeddings


# ----- refusals


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(open_checkpoint(str(folder)))
    for word in words:
        assert word in str(caught.value)


def change(name: str, to: Callable[[Tensor], Tensor] | None) -> Callable[[dict[str, Tensor]], None]:
    def apply(state: dict[str, Tensor]) -> None:
        if to is None:
            del state[name]
        else:
            state[name] = to(state.get(name, torch.ones(32)))

    return apply


GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("family", "edit", "words"),
    [
        ("llama", change(GATE, None), [GATE]),
        ("llama", change(GATE, lambda t: t[:-1]), [GATE, "model.safetensors", "[95, 64]", "[96, 64]"]),
        ("llama", change(GATE, lambda t: t.T), [GATE, "[64, 96]"]),
        ("llama", change("model.layers.0.self_attn.v_proj.bias", lambda t: t), ["v_proj.bias", "model.safetensors"]),
        ("llama", change("model.layers.2.input_layernorm.weight", lambda t: t), ["model.layers.2.input_layernorm"]),
        ("llama", change(GATE, lambda t: t.double()), [GATE, "F64"]),
        ("llama", change(GATE, lambda t: t.to(torch.float8_e4m3fn)), [GATE, "F8_E4M3"]),
        ("qwen2", change("model.layers.0.self_attn.q_proj.bias", None), ["q_proj.bias"]),
        ("qwen3", change("model.layers.0.self_attn.k_norm.weight", None), ["k_norm.weight"]),
        ("llama", change("model.layers.0.self_attn.q_norm.weight", lambda t: t), ["q_norm.weight"]),
    ],
)
def test_tensors_that_do_not_fit(
    family: str, edit: Callable[[dict[str, Tensor]], None], words: list[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, family)
    state = load_file(tmp_path / "model.safetensors")
    edit(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    refused(tmp_path, *words)


def test_buffers_of_old_checkpoints_are_harmless(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.float64)
    save_file(state, tmp_path / "model.safetensors")
    load(open_checkpoint(str(tmp_path)))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.3, 0.97, -1])
def test_a_file_cut_short(keep: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: int(keep * len(raw)) if isinstance(keep, float) else keep])
    refused(tmp_path, "model.safetensors")


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.unlink()
    refused(tmp_path, shard.name)


def test_an_index_that_lies(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    true = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(true.values()))
    edit_json(index, weight_map={**true, GATE: first if true[GATE] == second else second})
    refused(tmp_path, index.name, GATE)
    edit_json(index, weight_map={**true, "model.layers.9.x": first})
    refused(tmp_path, index.name, "model.layers.9.x")
    edit_json(index, weight_map={name: file for name, file in true.items() if name != GATE})
    refused(tmp_path, index.name, GATE)
    edit_json(index, weight_map={**true, GATE: "../elsewhere.safetensors"})
    refused(tmp_path, index.name, "../elsewhere.safetensors")
    edit_json(index, weight_map=[first])
    refused(tmp_path, index.name, "weight_map")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    both = load_file(tmp_path / "model-00001-of-00002.safetensors")
    name = next(iter(both))
    path = tmp_path / "model-00002-of-00002.safetensors"
    save_file({**load_file(path), name: both[name]}, path)
    refused(tmp_path, path.name, name)


class Boom:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_unread(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Boom(tmp_path / "ran")))
    refused(folder, name, "safetensors")
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    refused(tmp_path, "model.safetensors.index.json", "weights.safetensors")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 2),
        ("num_key_value_heads", 4),
        ("num_hidden_layers", 1),
        ("num_hidden_layers", 3),
        ("vocab_size", 346),
        ("intermediate_size", 8),
        ("hidden_size", 32),
    ],
)
def test_sizes_that_contradict_the_tensors(field: str, value: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", **{field: value})
    refused(tmp_path, ".weight")


@pytest.mark.parametrize(
    "name", [EMBEDDING, "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"]
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers(name: str, value: float, tmp_path: Path) -> None:
    state = random_weights(config_json())
    state[name][3, 5] = value
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, state=state)))
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {name} holds NaN or infinity"):
        load(checkpoint)


def test_weights_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    state = random_weights(config_json())
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, state=state)))
    with pytest.raises(ModelError, match=r"up_proj.*torch\.float16.*wider range"):
        checkpoint.load(torch.float16, torch.device("cpu"))
    load(checkpoint)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
)
def test_a_pipe_in_a_models_folder_hangs_nobody(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"{name} is a pipe or a device"):
        open_checkpoint(str(folder))
