"""The whole model with nothing clever in it: token ids in, logits out, every token computed every time.

The lessons start from this one. It is slow and easy to believe; the engine must give the same tokens.

Letters: S sequences, T tokens of each, E hidden size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.config import ModelConfig
from labkit.models.layout import DecoderWeights, LayerWeights


class PlainModel:
    """A llama-family decoder without a cache.

    Raises:
        ValueError: for a model with a rope type or a sliding window; the engine's decoder knows them, this does not.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights):
        if config.rope.rope_type != "default" or any(config.sliding_windows):
            raise ValueError("the plain model knows plain RoPE and full attention only; take toy or smollm2-135m")
        self.config = config
        self.weights = weights

    @property
    def parameters_in_a_pass(self) -> int:
        """Numbers that one pass reads in full: all but the embedding table, of which it looks up a row a token."""
        weights = self.weights
        in_layers = (getattr(layer, field.name) for layer in weights.layers for field in dataclasses.fields(layer))
        matrices = [*in_layers, weights.norm, weights.lm_head]
        return sum(matrix.numel() for matrix in matrices if matrix is not None)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [S, T, V] for ids [S, T]; position t's logits say what may follow token t."""
        weights = self.weights
        x = F.embedding(ids.to(weights.embedding.device), weights.embedding)
        cos, sin = self.angles(ids.shape[1], x)
        for layer in weights.layers:
            x = x + self.attention(layer, rms_norm(x, layer.input_norm, self.config.rms_norm_eps), cos, sin)
            gate, up = F.linear(rms_norm(x, layer.post_attention_norm, self.config.rms_norm_eps), layer.gate_up).chunk(
                2, dim=-1
            )
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(rms_norm(x, weights.norm, self.config.rms_norm_eps), weights.lm_head)

    def angles(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D] by which each position's queries and keys are rotated."""
        size = self.config.head_dim
        powers = torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size
        positions = torch.arange(length, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, self.config.rope.theta**-powers).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def attention(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[S, T, E] to [S, T, E]: each token looks at itself and those before it."""
        config = self.config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        parts = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (heads + 2 * kv_heads, size)).transpose(1, 2)
        q, k, v = parts.split((heads, kv_heads, kv_heads), dim=1)  # [S, H or K, T, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, config.rms_norm_eps), rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return F.linear(out.transpose(1, 2).flatten(2), layer.output)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / root mean square of x, over the last dimension, times weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: the two halves of each head are the coordinates that turn. [S, H, T, D] to the same."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
