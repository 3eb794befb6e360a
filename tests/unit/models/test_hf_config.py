"""config.json: the same meaning as in transformers, or a refusal that names the file and the field."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from labkit.config import ModelConfig, RopeConfig
from labkit.errors import ModelError
from labkit.models.hf_config import parse_config, read_config
from tests.checkpoints import FAMILIES, config_json, write_json

PATH = Path("somewhere/config.json")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 48}


def parse(family: str = "llama", generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    return parse_config(config_json(family, **fields), PATH, generation)


def test_a_plain_llama() -> None:
    config = parse()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.rope == RopeConfig() and config.sliding_windows == (None, None)
    assert (config.qkv_bias, config.qk_norm, config.dtype) == (False, False, "float32")
    assert config.bos_token_id == 1 and config.eos_token_ids == (2,)


def test_what_sets_the_families_apart() -> None:
    assert parse("qwen2").qkv_bias and not parse("qwen2").qk_norm
    assert parse("qwen3").qk_norm and not parse("qwen3").qkv_bias
    assert parse("qwen3").head_dim == 24 and parse("qwen3", head_dim=...).head_dim == 128
    assert parse("mistral").sliding_windows == (20, 20)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"num_key_value_heads": ...}),
        ("llama", {"num_key_value_heads": None, "head_dim": 32}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
        ("llama", {"rope_scaling": YARN}),
        ("llama", {"rope_theta": ..., "rope_parameters": {**YARN, "rope_theta": 5e5, "beta_fast": 16.0}}),
        ("llama", {"rope_theta": ..., "rms_norm_eps": ..., "tie_word_embeddings": ...}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 3.0}}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": ...}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20}),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 9}),
    ],
    ids=str,
)
def test_same_meaning_as_transformers(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig

    write_json(tmp_path / "config.json", config_json(family, **fields))
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours, _ = read_config(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = {name: value for name, value in theirs.rope_parameters.items() if value is not None}
    assert ours.rope.rope_type == rope["rope_type"] and ours.rope.theta == rope["rope_theta"]
    for name in rope.keys() - {"rope_type", "type", "rope_theta"}:
        assert getattr(ours.rope, name) == rope[name], name
    kinds = (
        getattr(theirs, "layer_types", None)
        or ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"] * ours.num_layers
    )
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert list(ours.sliding_windows) == windows


def test_both_spellings_are_one_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    write_json(tmp_path / "config.json", config_json(rope_scaling=LLAMA3, rope_theta=500000.0))
    theirs = AutoConfig.from_pretrained(tmp_path)
    first, _ = read_config(tmp_path)
    theirs.save_pretrained(tmp_path)
    assert "rope_parameters" in (tmp_path / "config.json").read_text()
    assert read_config(tmp_path)[0] == first


def test_yarn_has_all_its_parameters() -> None:
    given = {**YARN, "attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5}
    rope = parse(rope_scaling={**given, "truncate": False}).rope
    assert rope == RopeConfig(
        "yarn",
        factor=3.0,
        original_max_position_embeddings=48,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.2,
        mscale=0.7,
        mscale_all_dim=0.5,
        truncate=False,
    )
    # without a factor: the ratio of the two lengths, as in transformers
    assert parse(rope_scaling={**YARN, "factor": None}).rope.factor == 512 / 48


def test_eos_of_generation_config_wins_and_its_sampling_is_only_reported(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_json(eos_token_id=[3, 4]))
    assert read_config(tmp_path)[0].eos_token_ids == (3, 4)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 5], "temperature": 0.3, "top_p": None})
    config, defaults = read_config(tmp_path)
    assert config.eos_token_ids == (2, 5) and defaults == {"temperature": 0.3}
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 7})
    assert read_config(tmp_path)[0].eos_token_ids == (7,)
    assert parse(eos_token_id=None, bos_token_id=None).eos_token_ids == ()
    assert parse(bos_token_id=None, generation={"bos_token_id": 6}).bos_token_id == 6


@pytest.mark.parametrize(("field", "value"), [("torch_dtype", "bfloat16"), ("dtype", "torch.bfloat16")])
def test_dtype_under_either_name(field: str, value: str) -> None:
    assert parse(**{"torch_dtype": ..., field: value}).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "model_type", "gpt_neox"),
        ("llama", "model_type", None),
        ("llama", "hidden_size", 0),
        ("llama", "hidden_size", ...),
        ("llama", "hidden_size", "64"),
        ("llama", "hidden_size", True),
        ("llama", "vocab_size", ...),
        ("llama", "num_hidden_layers", -1),
        ("llama", "num_attention_heads", 5),
        ("llama", "num_key_value_heads", 3),
        ("llama", "head_dim", 15),
        ("llama", "intermediate_size", 1.5),
        ("llama", "max_position_embeddings", ...),
        ("llama", "rms_norm_eps", 0),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "rope_theta", -1.0),
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),
        ("mistral", "attention_bias", True),
        ("qwen3", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "rope_interleaved", True),
        ("llama", "sliding_window", 20),
        ("llama", "layer_types", ["full_attention", "sliding_attention"]),
        ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
        ("mistral", "sliding_window", 0),
        ("qwen2", "layer_types", ["sliding_attention", "full_attention"]),
        ("qwen2", "layer_types", ["full_attention"]),
        ("qwen2", "layer_types", ["full_attention", "linear_attention"]),
        ("qwen2", "use_sliding_window", "yes"),
        ("qwen2", "use_mrope", True),
        ("llama", "residual_multiplier", 0.22),
        ("llama", "tie_word_embeddings", "true"),
        ("llama", "torch_dtype", "float8_e4m3fn"),
        ("llama", "eos_token_id", 347),
        ("llama", "eos_token_id", "</s>"),
        ("llama", "bos_token_id", -1),
    ],
    ids=str,
)
def test_refused_by_name(family: str, field: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        parse(family, **{field: value})
    assert "config.json" in str(caught.value) and field in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "helix", "factor": 2.0}, "rope_type"),
        ({"type": "helix", "factor": 2.0}, "rope_type"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "original_max_position_embeddings": 0.5}, "original_max_position_embeddings"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({**YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling"),
        ("linear", "rope_scaling"),
    ],
    ids=str,
)
def test_rope_refused_by_name(rope: object, named: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(rope_scaling=rope)
    assert "config.json" in str(caught.value) and named in str(caught.value)
    if isinstance(rope, dict):
        with pytest.raises(ModelError):
            parse(rope_theta=..., rope_parameters={**rope, "rope_theta": 1e4})


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "\xff"])
def test_files_that_are_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)
    write_json(tmp_path / "config.json", config_json())
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_config(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_generation_config_with_an_id_outside_the_vocabulary() -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is 999"):
        parse(generation={"eos_token_id": 999})


def test_a_config_of_a_billion_layers_is_refused_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(ModelError, match=r"config\.json: num_hidden_layers is 1000000000; at most"):
        parse(num_hidden_layers=10**9)
    assert time.monotonic() - begin < 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_regular_file(name: str, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_json())
    path = tmp_path / name
    for make, says in (
        (lambda: os.mkfifo(path), "a pipe or a device"),
        (path.mkdir, "a folder"),
        (lambda: path.symlink_to("/dev/zero"), "a pipe or a device"),
        (lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 10**12), "bytes"),
    ):
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
        make()
        with pytest.raises(ModelError, match=says) as error:
            read_config(tmp_path)
        assert name in str(error.value)
