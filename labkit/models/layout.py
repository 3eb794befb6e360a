"""The weights of a decoder as the engine holds them: merged where one matrix product does the work of several.

Letters: E hidden size, F intermediate size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LayerWeights:
    """One transformer block. Rows of a matrix are outputs, as in torch.nn.functional.linear."""

    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2K) * D, E]: all query heads, then keys, then values
    qkv_bias: Tensor | None  # [(H + 2K) * D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    output: Tensor  # [E, H * D]
    post_attention_norm: Tensor  # [E]
    gate_up: Tensor  # [2F, E]: gate rows, then up rows
    down: Tensor  # [E, F]


@dataclass
class DecoderWeights:
    """The whole model. With tied embeddings `lm_head` is the very tensor `embedding`."""

    embedding: Tensor  # [V, E]
    layers: list[LayerWeights]
    norm: Tensor  # [E]
    lm_head: Tensor  # [V, E]
