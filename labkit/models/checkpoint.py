"""A model, opened: config and tokenizer read and every tensor checked, before any weight is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from labkit.config import ModelConfig
from labkit.errors import ModelError
from labkit.models import sources
from labkit.models.gguf import GgufFile
from labkit.models.gguf_model import GgufTensors, read_gguf_config
from labkit.models.gguf_tokenizer import load_gguf_tokenizer
from labkit.models.hf_config import read_config
from labkit.models.layout import DecoderWeights
from labkit.models.tokenizer import Tokenizer, load_tokenizer
from labkit.models.weights import Safetensors, TensorFile, build_weights, check_tensors, num_parameters


class Checkpoint:
    """What open_checkpoint() returns.

    Attributes:
        path: the folder or the .gguf file.
        name: the model as the user called it.
        num_parameters: exact; a tied lm_head counts once.
        sampling_defaults: of generation_config.json, for information: nothing uses them unasked.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        config: ModelConfig,
        tokenizer: Tokenizer,
        tensors: TensorFile,
        sampling_defaults: dict[str, Any] | None = None,
    ):
        self.path = path
        self.name = name
        self.config = config
        self.tokenizer = tokenizer
        self.num_parameters = num_parameters(config)
        self.sampling_defaults = sampling_defaults or {}
        self._tensors = tensors

    def load(self, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
        """Read the weights. Raises ModelError naming the file and the tensor."""
        return build_weights(self.config, self._tensors, dtype, device)


def open_checkpoint(model: str) -> Checkpoint:
    """Find a model by name, folder, .gguf file or hub id, and check it.

    Raises:
        ModelError: naming the file and the field or tensor that is missing, wrong or not supported.
    """
    path = sources.resolve(model)
    return _open_gguf(path, model) if path.is_file() else _open_folder(path, model)


def _open_folder(folder: Path, name: str) -> Checkpoint:
    if not (folder / "config.json").exists():
        files = sorted(str(path) for path in folder.glob("*.gguf"))
        hint = f"; it holds GGUF files, so give one of them, such as {files[0]}" if files else ""
        raise ModelError(f"{folder / 'config.json'} is missing, so this is no model folder{hint}")
    config, sampling_defaults = read_config(folder)
    tensors = Safetensors(folder)
    check_tensors(config, tensors, folder)
    if not config.dtype:
        config = dataclasses.replace(config, dtype=tensors.dtype)
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    tokenizer = load_tokenizer(folder, config.bos_token_id, eos)
    return Checkpoint(folder, name, config, tokenizer, tensors, sampling_defaults)


def _open_gguf(path: Path, name: str) -> Checkpoint:
    try:
        file = GgufFile(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    config = read_gguf_config(file)
    tensors = GgufTensors(file, config)
    check_tensors(config, tensors, path)
    return Checkpoint(path, name, config, load_gguf_tokenizer(file), tensors)
