"""What a user can set: the engine, one request, and what a checkpoint says of itself.

All three are frozen dataclasses, checked once, when they are made. Everything after that trusts them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.errors import RequestError

GRAPH_TOKENS = 2048  # of the largest step with prompts that is a CUDA graph; larger ones hide their launches
MAX_N = 128
MAX_LOGPROBS = 20
KERNELS = ("auto", "torch", "triton", "cuda")
SCHEDULERS = ("continuous", "static", "none")
POLICIES = ("fcfs", "priority")
GREEDY_BELOW = 1e-5  # temperatures; there the best logit wins over any noise, and float32 soon cannot divide by them
ADMISSIONS = ("optimistic", "reserve")
DTYPES = ("auto", "float32", "float16", "bfloat16")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max  # an int of any size; isfinite() would fail on some


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of a checkpoint, as `rope_parameters` of its config.json says."""

    rope_type: str = "default"  # default, linear, llama3 or yarn
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None = the paper's
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a llama-family checkpoint. Field names are this project's, values the checkpoint's."""

    family: str  # llama, mistral, qwen2 or qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one for each layer
    dtype: str  # as stored: float32, float16 or bfloat16
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs. See the contract's table for the meaning and the defaults.

    Raises:
        ValueError: naming the field, what was given and what is allowed.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None  # None: 8192, on a CPU 512
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    scheduler: str = "continuous"
    policy: str = "fcfs"
    admission: str = "optimistic"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kernels: str = "auto"
    cuda_graphs: bool = True
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    speculative: Mapping[str, Any] | None = None
    seed: int = 0
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_not_yet()

    def _check_choices(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("scheduler", SCHEDULERS),
            ("policy", POLICIES),
            ("admission", ADMISSIONS),
            ("kernels", KERNELS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it can be one of {', '.join(allowed)}")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "cuda_graphs", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it can be True or False")
        kind, _, index = str(self.device).partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
            raise ValueError(f"device is {self.device!r}; it can be auto, cpu, cuda or cuda:N")

    def _check_numbers(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_kv_blocks"):
            value = getattr(self, name)
            optional = EngineConfig.__dataclass_fields__[name].default is None
            if value is None and optional:
                continue
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of 1 or more")
        share = self.gpu_memory_utilization
        if not _is_number(share) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization is {share!r}; it is a share of memory, above 0 and at most 1")
        if not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number of at most 64 bits")

    def _check_not_yet(self) -> None:
        if self.quantization is not None:
            raise ValueError(f"quantization is {self.quantization!r}; only None is implemented so far")
        if self.kv_cache_dtype != "auto":
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; only 'auto' is implemented so far")
        if self.speculative is not None:
            raise ValueError("speculative is set; speculative decoding is not implemented yet, leave it at None")

    def replace(self, **fields: Any) -> EngineConfig:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **fields)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. Names and defaults are vLLM's.

    Order of operations: penalties and bias, temperature, min_p, top_k, top_p. Greedy (temperature 0, or below 1e-5)
    takes the largest logit after penalties and bias, the lowest id on a tie.

    Raises:
        RequestError: (a ValueError) naming the field, what was given and what is allowed.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: as many as the model's length and the KV pool hold
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None  # a string or any iterable of strings is taken
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    priority: int = 0  # the lowest runs first
    deadline_ms: float | None = None

    def __new__(cls, *args: Any, **fields: Any) -> SamplingParams:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise RequestError(f"SamplingParams has no field {name}; they are {', '.join(known)}{hint}", name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._normalise()
        self._check_lengths()
        self._check_sampling()
        self._check_ends()

    def _normalise(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.stop, str):
            set_(self, "stop", (self.stop,))
        elif self.stop is not None:
            if not isinstance(self.stop, Iterable) or isinstance(self.stop, (Mapping, bytes)):
                raise RequestError(f"stop is {self.stop!r}; it must be a string or a list of strings", "stop")
            set_(self, "stop", tuple(self.stop))
        if self.stop_token_ids is not None:
            if not isinstance(self.stop_token_ids, Iterable) or isinstance(self.stop_token_ids, (str, Mapping)):
                raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list", "stop_token_ids")
            set_(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.logit_bias is not None:
            set_(self, "logit_bias", self._token_keys(self.logit_bias))

    @staticmethod
    def _token_keys(bias: object) -> dict[int, float]:
        """JSON has string keys only, so "42" stands for the token id 42."""
        if not isinstance(bias, Mapping):
            raise RequestError(f"logit_bias is {bias!r}; it must map token ids to numbers", "logit_bias")
        out = {}
        for key, value in bias.items():
            if not _is_int(key) and not (isinstance(key, str) and key.isdecimal() and key.isascii() and len(key) < 20):
                raise RequestError(f"logit_bias has the key {key!r}; keys are token ids", "logit_bias")
            token = int(key)
            if token < 0 or not _is_number(value) or abs(value) > 100:
                raise RequestError(
                    f"logit_bias of {key!r} is {value!r}; ids are 0 or more, values between -100 and 100", "logit_bias"
                )
            out[token] = float(value)
        return out

    def _check_int(self, name: str, low: int, high: float = math.inf, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value) or not low <= value <= high:
            bound = f"{low} or more" if math.isinf(high) else f"from {low} to {high}"
            raise RequestError(f"{name} is {value!r}; it must be a whole number, {bound}", name)

    def _check_number(self, name: str, low: float, high: float = math.inf, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not (low < value if open_low else low <= value) or value > high:
            start = f"above {low}" if open_low else f"{low} or more"
            raise RequestError(
                f"{name} is {value!r}; it must be a number, {start}"
                + ("" if math.isinf(high) else f", at most {high}"),
                name,
            )

    def _check_lengths(self) -> None:
        self._check_int("n", 1, MAX_N)
        # 0 scores a prompt without writing anything; it only makes sense when the prompt's logprobs are wanted.
        self._check_int("max_tokens", 0 if self.prompt_logprobs is not None else 1, optional=True)
        self._check_int("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}", "min_tokens"
            )
        self._check_int("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._check_int("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)

    def _check_sampling(self) -> None:
        self._check_number("temperature", 0)
        self._check_number("top_p", 0, 1, open_low=True)
        self._check_int("top_k", -1)
        self._check_number("min_p", 0, 1)
        self._check_number("repetition_penalty", 0, open_low=True)
        self._check_number("presence_penalty", -2, 2)
        self._check_number("frequency_penalty", -2, 2)
        self._check_int("seed", -(2**63), 2**64 - 1, optional=True)

    def _check_ends(self) -> None:
        for text in self.stop or ():
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {text!r}; each stop must be a string that is not empty", "stop")
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise RequestError(f"stop holds {text!r}, with a lone surrogate, which no text contains", "stop")
        for token in self.stop_token_ids or ():
            if not _is_int(token) or token < 0:
                raise RequestError(f"stop_token_ids holds {token!r}; each must be a token id", "stop_token_ids")
        flags = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it can be True or False", name)
        if not self.detokenize and self.stop:
            raise RequestError("stop needs text, so it cannot go with detokenize=False", "stop")
        self._check_int("priority", -(2**31), 2**31 - 1)
        if self.deadline_ms is not None:
            raise RequestError(
                "deadline_ms is set; no policy looks at deadlines yet, leave it at None and see priority", "deadline_ms"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_filters(self) -> bool:
        """True if some token may be cut away before the draw."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


__all__ = ["EngineConfig", "ModelConfig", "RopeConfig", "SamplingParams"]
