"""GGUF files: the reference's numbers, the folder's tensors, and damage found before anything is read."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from labkit.config import RopeConfig
from labkit.errors import ModelError
from labkit.models.checkpoint import open_checkpoint
from labkit.models.gguf import GgufFile
from labkit.models.gguf_model import llama3_divisors, read_gguf_config
from tests.checkpoints import config_json, random_weights, write_checkpoint, write_gguf
from tests.unit.models.test_weights import flat

CPU = torch.device("cpu")
# Rows of 256, so that K-quants fit as well.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 320}


def write(
    path: Path, family: str = "llama", kind: str = "F32", metadata: dict[str, Any] | None = None, **fields: Any
) -> Path:
    config = config_json(family, **fields)
    write_gguf(path, config, random_weights(config), kind, metadata=metadata)
    return path


# ----- numbers


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_dequantised_as_the_reference_does(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(values, quant)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "x.gguf")
    assert file.tensors["x"].shape == (8, 64)
    np.testing.assert_allclose(file.read("x").astype(np.float32), gguf.dequantize(raw, quant), rtol=1e-6)
    assert np.abs(file.read("x") - values).max() < 0.5  # and they are the numbers that were meant


def test_q4_1_by_hand(tmp_path: Path) -> None:
    """Scale, then minimum, then 16 bytes: low nibbles are elements 0 to 15, high ones 16 to 31."""
    nibbles = np.arange(32) % 16
    packed = (nibbles[:16] | nibbles[16:][::-1] << 4).astype(np.uint8)
    block = np.concatenate([np.array([0.5, -3.0], np.float16).view(np.uint8), packed])
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", block.reshape(1, 20), raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = 0.5 * np.concatenate([nibbles[:16], nibbles[16:][::-1]]) - 3.0
    np.testing.assert_array_equal(GgufFile(tmp_path / "x.gguf").read("x")[0], want)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_as_the_reference_does(kind: str, tmp_path: Path) -> None:
    """The gguf package reads K-quants and cannot write them; any bytes are blocks, with sane scales put in."""
    quant = gguf.GGMLQuantizationType[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    raw = np.random.default_rng(1).integers(0, 60, (600, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = gguf.dequantize(raw, quant)
    assert want.shape == (600, 512) and np.isfinite(want).all() and want.std() > 0
    np.testing.assert_array_equal(GgufFile(tmp_path / "x.gguf").read("x"), want)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_folder_and_file_hold_the_same_tensors(family: str, tied: bool, kind: str, tmp_path: Path) -> None:
    fields = {"head_dim": 32, "hidden_size": 128, "tie_word_embeddings": tied, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "rope_theta": 123456.7}
    if family == "mistral":
        fields["sliding_window"] = None  # GGUF does not tell it
    config = config_json(family, **fields)
    held = write_gguf(tmp_path / "model.gguf", config, random_weights(config), kind)
    folder = open_checkpoint(str(write_checkpoint(tmp_path / "hf", family, state=held, **fields)))
    file = open_checkpoint(str(tmp_path / "model.gguf"))
    for x, y in zip(flat(folder.load(torch.float32, CPU)), flat(file.load(torch.float32, CPU)), strict=True):
        assert torch.equal(x, y)
    assert file.num_parameters == folder.num_parameters
    mine = vars(folder.config) | {"family": file.config.family, "dtype": file.config.dtype}
    assert vars(file.config) == mine
    weights = file.load(torch.float32, CPU)
    assert (weights.lm_head is weights.embedding) == tied


# ----- metadata


def config_of(tmp_path: Path, family: str = "llama", **metadata: Any) -> Any:
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return read_gguf_config(GgufFile(write(tmp_path / "model.gguf", family, metadata=keys)))


def test_rope_scaling_keys(tmp_path: Path) -> None:
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.5}
    assert config_of(tmp_path, **linear).rope == RopeConfig("linear", 10000.0, 2.5)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    assert config_of(tmp_path, **yarn).rope == RopeConfig("yarn", 10000.0, 4.0, 128)
    assert config_of(tmp_path, **{"llama.rope.scaling.type": "none"}).rope == RopeConfig()


@pytest.mark.parametrize(
    ("theta", "head_dim", "scaling"),
    [(500000.0, 64, (8.0, 8192, 4.0)), (500000.0, 128, (32.0, 8192, 4.0)), (10000.0, 64, (4.0, 48, 6.0))],
)
def test_llama3_scaling_is_found_again(
    theta: float, head_dim: int, scaling: tuple[float, int, float], tmp_path: Path
) -> None:
    factor, original, high = scaling
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    divisors = llama3_divisors(wavelengths, factor, original, 1.0, high).astype(np.float32)
    config = config_json(head_dim=head_dim, rope_theta=theta)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, random_weights(config), extra={"rope_freqs.weight": divisors})
    assert open_checkpoint(str(path)).config.rope == RopeConfig("llama3", theta, factor, original, 1.0, high)


def test_llama3_divisors_are_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    parameters |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=parameters
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, torch.device("cpu"))
    plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / llama3_divisors(2 * np.pi / plain, 8.0, 8192, 1.0, 4.0), scaled, rtol=1e-5)


def test_other_frequency_factors_are_refused(tmp_path: Path) -> None:
    config = config_json()
    for values in (np.linspace(1, 3, 8, dtype=np.float32), np.ones(7, np.float32)):
        write_gguf(tmp_path / "x.gguf", config, random_weights(config), extra={"rope_freqs.weight": values})
        with pytest.raises(ModelError, match=r"x\.gguf.*rope_freqs\.weight"):
            open_checkpoint(str(tmp_path / "x.gguf"))


def test_end_of_turn_also_ends(tmp_path: Path) -> None:
    assert config_of(tmp_path, **{"tokenizer.ggml.eot_token_id": 4}).eos_token_ids == (2, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "gemma3"),
        ("llama.block_count", None),
        ("llama.attention.head_count", 5),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", [2, 4]),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.attn_factor", 1.5),
        ("llama.attention.sliding_window", 128),
        ("llama.expert_count", 8),
        ("llama.attention.unheard_of", 1.0),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.vocab_size", 346),
        ("tokenizer.ggml.eos_token_id", 347),
        ("tokenizer.ggml.model", "bert"),
        ("tokenizer.ggml.pre", "tekken"),
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.token_type", [1, 1]),
        ("tokenizer.ggml.merges", ["Ġ nonsense"]),
        ("split.count", 3),
    ],
    ids=str,
)
def test_metadata_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", metadata={key: value})
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(path))
    assert "model.gguf" in str(caught.value)
    assert key.rsplit(".", 1)[1] in str(caught.value) or "token_embd.weight" in str(caught.value)


def test_tensors_refused_by_name(tmp_path: Path) -> None:
    config = config_json()
    state = random_weights(config)
    name = "model.layers.1.mlp.up_proj.weight"
    for change, words in (
        ({name: None}, ["blk.1.ffn_up.weight", name]),
        ({name: state[name][:-1]}, ["blk.1.ffn_up.weight", "[95, 64]"]),
    ):
        changed = {key: value for key, value in {**state, **change}.items() if value is not None}
        write_gguf(tmp_path / "x.gguf", config, changed)
        with pytest.raises(ModelError) as caught:
            open_checkpoint(str(tmp_path / "x.gguf"))
        assert all(word in str(caught.value) for word in ["x.gguf", *words])
    write_gguf(tmp_path / "x.gguf", config, state, extra={"blk.0.attn_q.lora_a": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"x\.gguf.*blk\.0\.attn_q\.lora_a"):
        open_checkpoint(str(tmp_path / "x.gguf"))


# ----- damage


def offset_field(raw: bytes, name: str) -> int:
    """Where the file keeps a tensor's offset: after its name, dimensions and type."""
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dims,) = struct.unpack_from("<I", raw, at)
    return at + 4 + 8 * dims + 4


def with_offset(raw: bytes, name: str, offset: int) -> bytes:
    at = offset_field(raw, name)
    return raw[:at] + struct.pack("<Q", offset) + raw[at + 8 :]


def offset_of(raw: bytes, name: str) -> int:
    return int(struct.unpack_from("<Q", raw, offset_field(raw, name))[0])


DOWN, UP = "blk.0.ffn_down.weight", "blk.0.ffn_up.weight"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda raw: with_offset(raw, DOWN, 2**40), DOWN),
        (lambda raw: with_offset(raw, DOWN, 2**64 - 32), DOWN),
        (lambda raw: with_offset(raw, DOWN, offset_of(raw, DOWN) + 4), "is not aligned"),
        (lambda raw: with_offset(raw, DOWN, offset_of(raw, UP)), "overlaps"),
        (lambda raw: raw[:-1], "offset"),
    ],
    ids=["2^40", "2^64-32", "unaligned", "two-at-one-place", "cut-by-a-byte"],
)
def test_offsets_that_lie(damage: Callable[[bytes], bytes], named: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf")
    raw = whole.read_bytes()
    open_checkpoint(str(whole))
    path = tmp_path / "harmed.gguf"
    path.write_bytes(damage(raw))
    tracemalloc.start()
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    for word in ("harmed.gguf", named, "offset", str(path.stat().st_size)):
        assert word in str(caught.value)


@pytest.mark.parametrize("alignment", [0, 3, 1, 2**31])
def test_alignment_that_is_none(alignment: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", metadata={"general.alignment": 32})
    raw = path.read_bytes()
    at = raw.index(b"general.alignment") + len("general.alignment") + 4
    path.write_bytes(raw[:at] + struct.pack("<I", alignment) + raw[at + 4 :])
    with pytest.raises(ModelError, match=r"x\.gguf .*general\.alignment"):
        open_checkpoint(str(path))


def test_another_alignment_is_fine(tmp_path: Path) -> None:
    config = config_json()
    state = random_weights(config)
    write_gguf(tmp_path / "x.gguf", config, state, alignment=128)
    weights = open_checkpoint(str(tmp_path / "x.gguf")).load(torch.float32, CPU)
    assert torch.equal(weights.norm, state["model.norm.weight"])


@pytest.mark.parametrize("keep", [0, 3, 20, 24, 100, 5_000, 0.5, 0.99])
def test_cut_anywhere(keep: float, tmp_path: Path) -> None:
    raw = write(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(raw[: int(keep * len(raw)) if isinstance(keep, float) else keep])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        open_checkpoint(str(tmp_path / "cut.gguf"))


def test_counts_and_lengths_that_lie(tmp_path: Path) -> None:
    """Each 8-byte number of the header's first part in turn set to something huge: an error, at once, no allocation."""
    raw = write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "harmed.gguf"
    places = [8, 16, 24, raw.index(b"tokenizer.ggml.tokens") - 8, raw.index(b"tokenizer.ggml.tokens") + 29]
    places += [raw.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8]
    for place in places:
        for lie in (2**63, 2**64 - 1, 2**40):
            path.write_bytes(raw[:place] + struct.pack("<Q", lie) + raw[place + 8 :])
            with pytest.raises(ModelError, match=r"harmed\.gguf"):
                GgufFile(path)


def test_any_flipped_byte_of_the_header_is_an_error_or_a_model(tmp_path: Path) -> None:
    raw = write(tmp_path / "whole.gguf", num_hidden_layers=1).read_bytes()
    header = raw.index(b"tokenizer.ggml.tokens")
    path = tmp_path / "harmed.gguf"
    rng = np.random.default_rng(2)
    refused = 0
    for _ in range(60):
        harmed = bytearray(raw)
        harmed[rng.integers(header)] ^= 1 << rng.integers(8)
        path.write_bytes(harmed)
        try:
            open_checkpoint(str(path))
        except ModelError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("at", "value", "named"), [(0, b"GGML", "no GGUF"), (4, b"\1\0\0\0", "version"), (4, b"\0\0\0\3", "version")]
)
def test_other_files(at: int, value: bytes, named: str, tmp_path: Path) -> None:
    raw = bytearray(write(tmp_path / "whole.gguf").read_bytes())
    raw[at : at + 4] = value
    (tmp_path / "other.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=named):
        open_checkpoint(str(tmp_path / "other.gguf"))


def test_types_that_do_not_run_here(tmp_path: Path) -> None:
    raw = write(tmp_path / "whole.gguf").read_bytes()
    at = offset_field(raw, DOWN) - 4
    for kind, named in ((16, "IQ2_XXS"), (24, "I8"), (12, "blocks of 256"), (77, "unknown type")):
        (tmp_path / "x.gguf").write_bytes(raw[:at] + struct.pack("<I", kind) + raw[at + 4 :])
        with pytest.raises(ModelError, match=named):
            open_checkpoint(str(tmp_path / "x.gguf"))
