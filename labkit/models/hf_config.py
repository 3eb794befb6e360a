"""config.json and generation_config.json of a folder in Hugging Face layout, read into a ModelConfig.

A field that changes the numbers is acted on or refused by name; none is passed over. Defaults of absent fields
are those of transformers' configuration classes, so that a checkpoint means the same in both.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from labkit.config import ModelConfig, RopeConfig
from labkit.errors import ModelError
from labkit.models.files import check_file

MAX_LAYERS = 1000  # the largest models have some 130; a config that says more would only fill memory with names
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "float16", "bfloat16")

# Fields of related families. Each one changes the numbers, and at these values it does not.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "attention_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
    "compression_config": (),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "no_rope_layers": ((), []),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "use_qk_norm": (False,),
    "vision_config": (),
    "audio_config": (),
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
# Allowed in every type: read elsewhere, or written for people.
_ROPE_KEYS_ANYWHERE = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
)


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises ModelError naming the file when it is missing, damaged or no object."""
    check_file(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; a model folder needs config.json, *.safetensors and tokenizer.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds {type(data).__name__}, where a JSON object with named fields is needed")
    return data


def read_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's shape, and the sampling defaults of generation_config.json (for information only)."""
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    config = parse_config(read_json(folder / "config.json"), folder / "config.json", generation)
    names = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return config, {name: generation[name] for name in names if generation.get(name) is not None}


def parse_config(data: dict[str, Any], path: Path, generation: dict[str, Any] | None = None) -> ModelConfig:
    """A ModelConfig out of the fields of config.json.

    Raises:
        ModelError: naming the file, the field, its value and what is allowed.
    """
    return _Reader(data, path).model_config(generation or {})


class _Reader:
    """One config.json; the methods take its fields and complain with its path."""

    def __init__(self, data: dict[str, Any], path: Path):
        self.data = data
        self.path = path

    def refuse(self, field: str, value: object, allowed: str) -> NoReturn:
        raise ModelError(f"{self.path}: {field} is {value!r}; {allowed}")

    def whole(self, field: str, default: int | None = None, data: dict[str, Any] | None = None) -> int:
        """A whole number of 1 or more. An absent field takes the default, null counts as absent."""
        value = (self.data if data is None else data).get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(field, value, "a whole number of 1 or more is needed")
        return value

    def number(self, field: str, default: float | None, data: dict[str, Any]) -> float:
        """A positive, finite number; absent or null takes the default."""
        value = data.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            self.refuse(field, value, "a number above 0 is needed")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.data.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(field, value, "it can be true or false")
        return value

    def model_config(self, generation: dict[str, Any]) -> ModelConfig:
        family = self.data.get("model_type")
        if family not in FAMILIES:
            self.refuse("model_type", family, f"the families that run here are {', '.join(FAMILIES)}")
        assert isinstance(family, str)
        self._refuse_what_is_not_acted_on()
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        layers, vocab = self.whole("num_hidden_layers"), self.whole("vocab_size")
        if layers > MAX_LAYERS:
            self.refuse("num_hidden_layers", layers, f"at most {MAX_LAYERS} run here")
        max_positions = self.whole("max_position_embeddings")
        return ModelConfig(
            family=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=self.whole("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=self._kv_heads(family, heads),
            head_dim=self._head_dim(family, hidden, heads),
            max_position_embeddings=max_positions,
            rms_norm_eps=self.number("rms_norm_eps", 1e-6, self.data),
            rope=self._rope(max_positions),
            tie_word_embeddings=self.flag("tie_word_embeddings", False),  # false is the default of all four families
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            sliding_windows=self._sliding_windows(family, layers),
            dtype=self._dtype(),
            bos_token_id=self._token_ids("bos_token_id", vocab, generation, generation_wins=False)[0],
            eos_token_ids=tuple(
                token for token in self._token_ids("eos_token_id", vocab, generation) if token is not None
            ),
        )

    def _refuse_what_is_not_acted_on(self) -> None:
        for field, harmless in _MUST_BE.items():
            value = self.data.get(field)
            if value is not None and value not in harmless:
                allowed = f"only {harmless[0]!r} runs here" if harmless else "models with this field do not run here"
                if field == "attention_bias":
                    allowed += ": it adds a bias to o_proj too, which this decoder does not have"
                self.refuse(field, value, allowed)

    def _kv_heads(self, family: str, heads: int) -> int:
        absent = {"llama": heads, "mistral": 8, "qwen2": 32, "qwen3": 32}[family]
        kv_heads = self.whole("num_key_value_heads", heads if "num_key_value_heads" in self.data else absent)
        if heads % kv_heads:
            self.refuse("num_key_value_heads", kv_heads, f"it must divide num_attention_heads, which is {heads}")
        return kv_heads

    def _head_dim(self, family: str, hidden: int, heads: int) -> int:
        if self.data.get("head_dim") is None and family != "qwen3" and hidden % heads:
            self.refuse("num_attention_heads", heads, f"without head_dim it must divide hidden_size, which is {hidden}")
        head_dim = self.whole("head_dim", 128 if family == "qwen3" else hidden // heads)
        if head_dim % 2:
            self.refuse("head_dim", head_dim, "rotary embedding turns pairs of dimensions, so it must be even")
        return head_dim

    def _rope(self, max_positions: int) -> RopeConfig:
        """Both spellings: rope_scaling beside rope_theta (transformers 4), all in rope_parameters (5)."""
        field = "rope_scaling" if self.data.get("rope_scaling") else "rope_parameters"
        rope = self.data.get(field) or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            self.refuse(field, rope, "one set of RoPE parameters for all layers is needed")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            self.refuse(f"{field}.rope_type", rope_type, f"the types that run here are {', '.join(ROPE_TYPES)}")
        for key, value in rope.items():
            if value is not None and key not in (*_ROPE_KEYS_ANYWHERE, *_ROPE_KEYS[rope_type]):
                self.refuse(f"{field}.{key}", value, f"RoPE of type {rope_type} has no such parameter here")
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            self.refuse(f"{field}.partial_rotary_factor", rope["partial_rotary_factor"], "only 1.0 runs here")
        theta = self.number("rope_theta", 10000.0, rope if rope.get("rope_theta") is not None else self.data)
        if rope_type == "default":
            return RopeConfig(theta=theta)
        if rope_type == "linear":
            return RopeConfig("linear", theta, self.number("factor", None, rope))
        # A top-level value wins, as transformers has it.
        holder = self.data if self.data.get("original_max_position_embeddings") is not None else rope
        original = self.whole("original_max_position_embeddings", max_positions, holder)
        if rope_type == "llama3":
            return self._llama3(field, rope, theta, original)
        return self._yarn(field, rope, theta, original, max_positions)

    def _llama3(self, field: str, rope: dict[str, Any], theta: float, original: int) -> RopeConfig:
        low, high = self.number("low_freq_factor", None, rope), self.number("high_freq_factor", None, rope)
        if high <= low:
            self.refuse(f"{field}.high_freq_factor", high, f"it must be above low_freq_factor, which is {low}")
        return RopeConfig("llama3", theta, self.number("factor", None, rope), original, low, high)

    def _yarn(self, field: str, rope: dict[str, Any], theta: float, original: int, max_positions: int) -> RopeConfig:
        def optional(key: str) -> float | None:
            # transformers takes a 0 for "not given" here
            return self.number(key, None, rope) if rope.get(key) else None

        truncate = rope.get("truncate", True)
        if not isinstance(truncate, bool):
            self.refuse(f"{field}.truncate", truncate, "it can be true or false")
        return RopeConfig(
            "yarn",
            theta,
            factor=self.number("factor", max_positions / original, rope),
            original_max_position_embeddings=original,
            beta_fast=optional("beta_fast") or 32.0,
            beta_slow=optional("beta_slow") or 1.0,
            attention_factor=self.number("attention_factor", None, rope)
            if rope.get("attention_factor") is not None
            else None,
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=truncate,
        )

    def _sliding_windows(self, family: str, layers: int) -> tuple[int | None, ...]:
        """How many tokens back each layer sees, itself included; None sees all."""
        types = self.data.get("layer_types")
        if types is not None and (
            not isinstance(types, list)
            or len(types) != layers
            or any(kind not in ("full_attention", "sliding_attention") for kind in types)
        ):
            self.refuse(
                "layer_types", types, f"full_attention or sliding_attention for each of {layers} layers is needed"
            )
        if family == "llama":
            if self.data.get("sliding_window") is not None:
                self.refuse("sliding_window", self.data["sliding_window"], "llama models have none")
            window = None
        elif family == "mistral":
            # absent means 4096 in transformers, null means none
            window = self.whole("sliding_window", 4096) if self.data.get("sliding_window", 4096) is not None else None
        else:
            return self._qwen_windows(types, layers)
        kind = "full_attention" if window is None else "sliding_attention"
        if types is not None and any(given != kind for given in types):
            self.refuse("layer_types", types, f"{family} layers are all alike, here all {kind}")
        return (window,) * layers

    def _qwen_windows(self, types: list[str] | None, layers: int) -> tuple[int | None, ...]:
        window = None
        if self.flag("use_sliding_window", False) and self.data.get("sliding_window", 4096) is not None:
            window = self.whole("sliding_window", 4096)
        if types is None:
            first = self.data.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int):
                self.refuse("max_window_layers", first, "a whole number is needed")
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        elif window is None and "sliding_attention" in types:
            self.refuse("layer_types", types, "sliding_attention needs use_sliding_window and a sliding_window")
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    def _dtype(self) -> str:
        """As stored; an absent field is filled in from the tensors when the checkpoint is opened."""
        field = "dtype" if self.data.get("dtype") is not None else "torch_dtype"
        value = self.data.get(field)
        if value is None:
            return ""
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        if name not in DTYPES:
            self.refuse(field, value, f"it can be one of {', '.join(DTYPES)}")
        return str(name)

    def _token_ids(
        self, field: str, vocab: int, generation: dict[str, Any], generation_wins: bool = True
    ) -> list[int | None]:
        """The ids of a field that holds one id, a list of ids or null; from the file that has the say."""
        files = [(self.path, self.data), (self.path.with_name("generation_config.json"), generation)]
        for path, data in reversed(files) if generation_wins else files:
            value = data.get(field)
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not ids or any(isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab for t in ids):
                raise ModelError(f"{path}: {field} is {value!r}; token ids from 0 to {vocab - 1} are needed")
            return list(ids)
        return [None]
