"""From stored tensors to DecoderWeights: every name and shape checked first, then built matrix by matrix.

Whatever the file format, tensors go by their Hugging Face names here. Letters: E hidden size, F intermediate size,
H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from labkit.config import ModelConfig
from labkit.errors import ModelError
from labkit.models.files import check_file
from labkit.models.hf_config import read_json
from labkit.models.layout import DecoderWeights, LayerWeights

EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Buffers that old checkpoints carry and that are computed from the config anyway.
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class TensorFile(Protocol):
    """Stored tensors, found by Hugging Face name."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What is there, without reading it."""

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""

    def label(self, name: str) -> str:
        """The tensor as messages call it; with its name in the file where that is another one."""

    def open(self) -> TensorReader:
        """A reader of its own: what it has mapped is given back when it and its tensors are dropped."""


class TensorReader(Protocol):
    def get(self, name: str) -> Tensor:
        """The tensor, mapped from the file where the format allows it."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that the config asks for."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    rows = {
        "q_proj": config.num_heads * head,
        "k_proj": config.num_kv_heads * head,
        "v_proj": config.num_kv_heads * head,
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, count in rows.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = (count, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}.bias"] = (count,)
        if config.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, config.num_heads * head)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes[NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def num_parameters(config: ModelConfig) -> int:
    """Exact; a tied lm_head counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def check_tensors(config: ModelConfig, file: TensorFile, path: Path) -> None:
    """Compare what is stored with what the config asks for.

    Raises:
        ModelError: naming the file and the first tensor that is missing, misshapen or one too many.
    """
    stored, expected = file.shapes(), expected_shapes(config)
    for name, shape in expected.items():
        if name not in stored:
            why = ""
            if name == LM_HEAD:
                why = (
                    "; config.json says tie_word_embeddings false (also when the field is absent), so it must be there"
                )
            raise ModelError(
                f"{path} holds no tensor {file.label(name)}, which a {config.family} model of this config needs{why}"
            )
        if stored[name] != shape:
            raise ModelError(
                f"{file.where(name)}: tensor {file.label(name)} has the shape {list(stored[name])}, "
                f"the config asks for {list(shape)}"
            )
    for name in stored:
        allowed = (
            name in expected or name.endswith(_IGNORED_ENDINGS) or (name == LM_HEAD and config.tie_word_embeddings)
        )
        if not allowed:
            raise ModelError(
                f"{file.where(name)}: tensor {name} has no place in a {config.family} model of this config; "
                "without it the numbers would be wrong"
            )


def build_weights(config: ModelConfig, file: TensorFile, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Read a checked file into the engine's layout, one matrix at a time.

    A tensor that needs no change stays mapped from the file (CPU, dtype as stored); merged and converted ones are
    new, and the mapping they were read through is dropped layer by layer. So the weights are in memory once.
    """
    kept, numbers = file.open(), _Numbers(file)

    def one(name: str) -> Tensor:
        return numbers.seen(name, kept.get(name).to(device=device, dtype=dtype))

    def merged(reader: TensorReader, *names: str) -> Tensor:
        parts = [reader.get(name) for name in names]
        out = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=dtype, device=device)
        for name, part, place in zip(names, parts, out.split([len(part) for part in parts]), strict=True):
            numbers.seen(name, place.copy_(part))
        return out

    embedding = one(EMBEDDING)
    layers = [_layer(config, one, partial(merged, file.open()), f"model.layers.{i}.") for i in range(config.num_layers)]
    if not config.tie_word_embeddings:
        lm_head = one(LM_HEAD)
    else:
        lm_head = embedding
        _check_stored_head(file)
    weights = DecoderWeights(embedding=embedding, layers=layers, norm=one(NORM), lm_head=lm_head)
    numbers.check()
    return weights


def _layer(
    config: ModelConfig, one: Callable[[str], Tensor], merged: Callable[..., Tensor], prefix: str
) -> LayerWeights:
    def qkv(kind: str) -> Tensor:
        return merged(*(f"{prefix}self_attn.{name}_proj.{kind}" for name in "qkv"))

    return LayerWeights(
        input_norm=one(f"{prefix}input_layernorm.weight"),
        qkv=qkv("weight"),
        qkv_bias=qkv("bias") if config.qkv_bias else None,
        q_norm=one(f"{prefix}self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=one(f"{prefix}self_attn.k_norm.weight") if config.qk_norm else None,
        output=one(f"{prefix}self_attn.o_proj.weight"),
        post_attention_norm=one(f"{prefix}post_attention_layernorm.weight"),
        gate_up=merged(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"),
        down=one(f"{prefix}mlp.down_proj.weight"),
    )


class _Numbers:
    """Finds NaN and infinity among the weights. One pass over each; a GPU is only waited for at the end."""

    def __init__(self, file: TensorFile):
        self._file = file
        self._ends: dict[str, Tensor] = {}  # [2]: smallest and largest; either is NaN if any number is

    def seen(self, name: str, tensor: Tensor) -> Tensor:
        self._ends[name] = torch.stack(torch.aminmax(tensor))
        return tensor

    def check(self) -> None:
        finite = torch.stack(list(self._ends.values())).isfinite().all(dim=1).tolist()
        for (name, ends), fine in zip(self._ends.items(), finite, strict=True):
            if not fine:
                raise ModelError(
                    f"{self._file.where(name)}: tensor {self._file.label(name)} holds NaN or infinity "
                    f"(as {ends.dtype}); the file is damaged, or needs a dtype with a wider range"
                )


def _check_stored_head(file: TensorFile) -> None:
    """A tied model may store its head, but only as the copy that it claims to be."""
    if LM_HEAD not in file.shapes():
        return
    reader = file.open()
    if not torch.equal(reader.get(LM_HEAD), reader.get(EMBEDDING)):
        raise ModelError(
            f"{file.where(LM_HEAD)}: {LM_HEAD} differs from {EMBEDDING}, but config.json says "
            "tie_word_embeddings true; set it to false if the model was trained with a head of its own"
        )


class Safetensors:
    """The *.safetensors of a folder: one model.safetensors, or shards with an index.

    Raises:
        ModelError: naming the file (and the tensor) when one is missing, cut short or not as the index says.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        self._files: dict[str, Path] = {}  # tensor name -> file
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        if single.exists():
            self._add(single)
        elif index.exists():
            self._add_shards(index)
        else:
            raise ModelError(_no_weights(folder))

    def _add(self, path: Path) -> None:
        check_file(path, most=None)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in self._files:
                        raise ModelError(f"{path}: tensor {name} is also in {self._files[name]}")
                    view = file.get_slice(name)
                    self._files[name] = path
                    self._shapes[name] = tuple(view.get_shape())
                    self._dtypes[name] = view.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is damaged, or not a safetensors file: {error}") from None
        for name, dtype in self._dtypes.items():
            if dtype not in ("F32", "F16", "BF16") and not name.endswith(_IGNORED_ENDINGS):
                raise ModelError(f"{self._files[name]}: tensor {name} is stored as {dtype}; F32, F16 and BF16 run here")

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise ModelError(f"{index}: weight_map must map each tensor's name to a file name")
        for file in sorted(set(weight_map.values())):
            if not file or file != Path(file).name:
                raise ModelError(f"{index}: weight_map names the file {file!r}; shards lie beside the index")
            path = index.with_name(file)
            if not path.exists():
                raise ModelError(f"{path} is missing; {index.name} says that it holds tensors of this model")
            self._add(path)
        for name, file in weight_map.items():
            if self._files.get(name) != index.with_name(file):
                raise ModelError(f"{index} says that tensor {name} is in {file}, where it is not")
        for name, path in self._files.items():
            if name not in weight_map:
                raise ModelError(f"{path} holds the tensor {name}, of which {index.name} knows nothing")

    @property
    def dtype(self) -> str:
        """As the embedding is stored: float32, float16 or bfloat16."""
        names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        return names.get(self._dtypes.get(EMBEDDING, ""), "float32")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def where(self, name: str) -> str:
        return str(self._files[name])

    def label(self, name: str) -> str:
        return name

    def open(self) -> SafetensorsReader:
        return SafetensorsReader(self._files)


class SafetensorsReader:
    """Maps each file once, when its first tensor is asked for; tensors are views of the mapping."""

    def __init__(self, files: dict[str, Path]):
        self._files = files
        self._open: dict[Path, Any] = {}

    def get(self, name: str) -> Tensor:
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from None
        return tensor


def _no_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return (
            f"{folder / pickled[0]} holds pickled weights, which can run any code when they are read; "
            "only safetensors are read here: convert it, or get the model's *.safetensors"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f"; it holds {', '.join(others[:3])}" if others else ""
    return f"{folder} holds neither model.safetensors nor model.safetensors.index.json with its shards{found}"
