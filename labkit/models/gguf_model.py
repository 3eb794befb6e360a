"""A llama, qwen2 or qwen3 model out of a GGUF file: its config, and its tensors under Hugging Face's names.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; tensor names and the order of rows:
conversion in llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from labkit.config import ModelConfig, RopeConfig
from labkit.errors import ModelError
from labkit.models.gguf import GgufFile
from labkit.models.hf_config import MAX_LAYERS
from labkit.models.weights import EMBEDDING, LM_HEAD, NORM

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # files of mistral models say llama
_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": NORM, "output.weight": LM_HEAD}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
# Every key of the architecture is acted on or known to be harmless; any other one is refused.
_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
_HARMLESS = {
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scale_linear": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """A ModelConfig out of a GGUF file's metadata.

    Raises:
        ModelError: naming the file, the key, its value and what is allowed.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: general.architecture is {arch!r}; those that run here are {', '.join(ARCHITECTURES)}"
        )
    return _Reader(file, arch).model_config()


class _Reader:
    def __init__(self, file: GgufFile, arch: str):
        self.file = file
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def refuse(self, key: str, value: object, allowed: str) -> ModelError:
        return ModelError(f"{self.file.path}: {self.arch}.{key} is {value!r}; {allowed}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # one number for each layer, all the same
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(key, value, "a whole number of 1 or more is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self.refuse(key, value, "a number above 0 is needed")
        # GGUF has float32 only; the shortest decimal that means the same float32 is the number that was meant.
        return float(str(np.float32(value))) if isinstance(value, float) else float(value)

    def model_config(self) -> ModelConfig:
        self._refuse_what_is_not_acted_on()
        hidden, heads = self.whole("embedding_length"), self.whole("attention.head_count")
        layers, kv_heads = self.whole("block_count"), self.whole("attention.head_count_kv", heads)
        if layers > MAX_LAYERS:
            raise self.refuse("block_count", layers, f"at most {MAX_LAYERS} run here")
        if heads % kv_heads:
            raise self.refuse("attention.head_count_kv", kv_heads, f"it must divide attention.head_count, {heads}")
        head_dim = self._head_dim(hidden, heads)
        embedding = self.file.tensors.get("token_embd.weight")
        vocab = self.whole("vocab_size", embedding.shape[0] if embedding else None)
        stored = embedding.type.name if embedding else ""
        return ModelConfig(
            family=self.arch,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=self.whole("feed_forward_length"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=self.whole("context_length"),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            rope=self._rope(head_dim),
            tie_word_embeddings="output.weight" not in self.file.tensors,
            qkv_bias=self.arch == "qwen2",
            qk_norm=self.arch == "qwen3",
            sliding_windows=(None,) * layers,
            dtype={"F32": "float32", "BF16": "bfloat16"}.get(stored, "float16"),
            bos_token_id=self._token_id("bos", vocab),
            eos_token_ids=self._eos_ids(vocab),
        )

    def _refuse_what_is_not_acted_on(self) -> None:
        if self.file.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{self.file.path}: split.count says that it is one part of several; join them first")
        for key, value in self.file.metadata.items():
            name = key.removeprefix(f"{self.arch}.")
            if name == key or name in _KEYS or value in _HARMLESS.get(name, ()):
                continue
            raise self.refuse(name, value, "this engine does not act on it, so the numbers would be wrong")

    def _head_dim(self, hidden: int, heads: int) -> int:
        if self.get("attention.key_length") is None and hidden % heads:
            raise self.refuse("attention.head_count", heads, f"it must divide embedding_length, which is {hidden}")
        head_dim = self.whole("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.whole(key, head_dim) != head_dim:
                raise self.refuse(key, self.get(key), f"only the head size runs here, which is {head_dim}")
        if head_dim % 2:
            raise self.refuse("attention.key_length", head_dim, "rotary embedding turns pairs, so it must be even")
        return head_dim

    def _token_id(self, name: str, vocab: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.file.metadata.get(key)
        if value is not None and (not isinstance(value, int) or not 0 <= value < vocab):
            raise ModelError(f"{self.file.path}: {key} is {value!r}; a token id from 0 to {vocab - 1} is needed")
        return value

    def _eos_ids(self, vocab: int) -> tuple[int, ...]:
        """End of text, end of turn, end of message: whichever the file names."""
        ids = [self._token_id(name, vocab) for name in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def _rope(self, head_dim: int) -> RopeConfig:
        theta = self.number("rope.freq_base", 10000.0)
        rope_type = self.get("rope.scaling.type", "none")
        if _ROPE_FREQS in self.file.tensors:
            if rope_type != "none":
                raise self.refuse("rope.scaling.type", rope_type, f"beside {_ROPE_FREQS} only none runs here")
            return self._llama3(theta, head_dim)
        if rope_type == "none":
            return RopeConfig(theta=theta)
        if rope_type == "linear":
            return RopeConfig("linear", theta, self.number("rope.scaling.factor"))
        if rope_type == "yarn":
            return RopeConfig(
                "yarn",
                theta,
                self.number("rope.scaling.factor"),
                self.whole("rope.scaling.original_context_length", self.whole("context_length")),
                beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
            )
        raise self.refuse("rope.scaling.type", rope_type, "the types that run here are none, linear and yarn")

    def _llama3(self, theta: float, head_dim: int) -> RopeConfig:
        """llama.cpp stores llama3 scaling as one divisor for each pair of dimensions; find its parameters again.

        Between the two wavelengths the smooth part is a straight line in 1/wavelength, so two points give both
        ends. Only the ratios original/low and original/high count: low is set to 1.
        """
        divisors = self.file.read(_ROPE_FREQS).astype(np.float64).reshape(-1)
        if len(divisors) != head_dim // 2:
            raise ModelError(f"{self.file.path}: {_ROPE_FREQS} has {len(divisors)} numbers, not {head_dim // 2}")
        if np.all(divisors == 1):
            return RopeConfig(theta=theta)
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        factor = round(float(divisors.max()), 4)
        guesses = [(8192, 4.0), (self.whole("context_length"), 4.0)]
        between = (divisors > 1 + 1e-4) & (divisors < factor * (1 - 1e-4))
        if between.sum() >= 2:
            smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
            slope, offset = np.polyfit(1 / wavelengths[between], smooth, 1)
            if slope > 0 and offset < 0:
                guesses.insert(0, (round(-slope / offset), round(1 - 1 / offset, 3)))
        for original, high in guesses:
            if original > 0 and np.allclose(llama3_divisors(wavelengths, factor, original, 1.0, high), divisors, 1e-4):
                return RopeConfig("llama3", theta, factor, original, 1.0, high)
        raise ModelError(
            f"{self.file.path}: {_ROPE_FREQS} holds factors that are not llama3 scaling; they do not run here"
        )


def llama3_divisors(
    wavelengths: NDArray[np.float64], factor: float, original: int, low: float, high: float
) -> NDArray[np.float64]:
    """What llama3 scaling divides each frequency by (Llama 3.1 reference code)."""
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def huggingface_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays as it is."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _PARTS:
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


class GgufTensors:
    """The tensors of a GGUF file by Hugging Face name, float32 (F16 as it is), rows in Hugging Face's order."""

    def __init__(self, file: GgufFile, config: ModelConfig):
        self._file = file
        self._names = {huggingface_name(name): name for name in file.tensors if name != _ROPE_FREQS}
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if config.family == "llama" else {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def where(self, name: str) -> str:
        return str(self._file.path)

    def label(self, name: str) -> str:
        for stored, top in _TOP.items():
            if top == name:
                return f"{stored} ({name})"
        for stored, part in _PARTS.items():
            if f".{part}." in name:
                return f"blk.{name.split('.')[2]}.{stored}.{name.rsplit('.', 1)[1]} ({name})"
        return name

    def open(self) -> GgufTensors:
        return self

    def get(self, name: str) -> Tensor:
        stored = self._names[name]
        values = self._file.read(stored)
        heads = self._heads.get(stored.split(".")[-2])
        return torch.from_numpy(_rows_in_order(values, heads) if heads else values)


def _rows_in_order(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo the order of q and k rows that llama.cpp keeps for `llama` files.

    It rotates neighbours (0, 1), (2, 3) …; the decoder here rotates (0, D/2), (1, D/2 + 1) …, as transformers does.
    """
    pairs = values.shape[0] // heads // 2
    return values.reshape(heads, pairs, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
