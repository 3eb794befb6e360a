"""A llama, in the shape that Mistral, Qwen2 and Qwen3 share.

    token ids ── embedding ──▶ residual stream [T, E]
                                   │
        ┌──────────── each layer ──┼───────────────────────────────────────────────┐
        │   RMSNorm → QKV → (QK-norm) → RoPE → paged attention → output → + stream  │
        │   RMSNorm → gate, up → SiLU × mul → down                      → + stream  │
        └──────────────────────────┼───────────────────────────────────────────────┘
                                   ▼
                            RMSNorm → hidden [T, E] ── lm_head ──▶ logits [rows, V]

The tokens of all sequences of a step lie in one row of T; only attention knows where one ends and the next begins.

What the families differ in is in ModelConfig: Qwen2 has a bias on QKV, Qwen3 a norm on every query and key head,
Mistral (and some Qwen) a sliding window, and each checkpoint its RoPE.

Letters: T tokens, E hidden size, F intermediate size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from labkit.config import ModelConfig
from labkit.kernels import activation, attention, backend, linear, paged_attention, qkv_rope, rms_norm, rope, tiles
from labkit.kernels.attention import AttentionBatch
from labkit.models.layout import DecoderWeights, LayerWeights


@dataclass(slots=True)
class DecoderBatch:
    """The tokens of one step."""

    token_ids: Tensor  # [T] int
    positions: Tensor  # [T] int: of each token in its own sequence
    attention: AttentionBatch


class Decoder:
    """The model: weights, and the order in which they are used. It keeps no state of a request.

    Args:
        max_model_len: how many positions the RoPE table holds.
        kernels: the backend, as EngineConfig.kernels.

    Raises:
        KernelError: this backend cannot run here.
    """

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_model_len: int, kernels: str = "auto"):
        device = weights.embedding.device
        self.config = config
        self.weights = weights
        self.backend = backend.choose(kernels, device, weights.embedding.dtype, config.head_dim)
        # None: prompts are attended to one by one
        self.prefill_tile = None
        if self.backend == "triton":
            group = config.num_heads // config.num_kv_heads
            self.prefill_tile = tiles.prefill_tile(weights.embedding.dtype, config.head_dim, group, device)
        self.cos_sin = rope.rope_table(config.rope, config.head_dim, max_model_len, device)

    def forward(self, batch: DecoderBatch, kv_cache: Tensor) -> Tensor:
        """Runs every layer on the step's tokens.

        Args:
            kv_cache: [layers, 2, N, B, K, D], keys and values of each layer; the step's own are written into it.

        Returns:
            Hidden states [T, E], normalised, ready for `logits`.
        """
        residual = functional.embedding(batch.token_ids, self.weights.embedding)
        x = self._norm(residual, self.weights.layers[0].input_norm)
        for index, layer in enumerate(self.weights.layers):
            x = self._attention(x, layer, index, batch, kv_cache[index])
            x, residual = self._add_norm(x, residual, layer.post_attention_norm)
            x = self._mlp(x, layer)
            following = self.weights.layers[index + 1].input_norm if index + 1 < len(kv_cache) else self.weights.norm
            x, residual = self._add_norm(x, residual, following)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary: [rows, E] -> [rows, V] float32."""
        return self._linear(hidden, self.weights.lm_head).float()

    def _attention(self, x: Tensor, layer: LayerWeights, index: int, batch: DecoderBatch, kv_cache: Tensor) -> Tensor:
        """[T, E] -> [T, E]; kv_cache is this layer's [2, N, B, K, D]."""
        config = self.config
        k_cache, v_cache = kv_cache.unbind(0)
        window = config.sliding_windows[index]
        qkv = self._linear(x, layer.qkv, layer.qkv_bias)
        if self.backend == "triton":
            q = qkv_rope.norm_rope_store_triton(
                qkv,
                batch.positions,
                self.cos_sin,
                k_cache,
                v_cache,
                batch.attention.slot_mapping,
                layer.q_norm,
                layer.k_norm,
                config.rms_norm_eps,
            )
            out = paged_attention.paged_attention(q, k_cache, v_cache, batch.attention, window)
            return self._linear(out.flatten(1), layer.output)
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(q, layer.q_norm)
            k = self._norm(k, layer.k_norm)
        q, k = rope.apply_rope(q, k, batch.positions, self.cos_sin)
        out = attention.attention(q, k, v, k_cache, v_cache, batch.attention, window)
        return self._linear(out.flatten(1), layer.output)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """[T, E] -> [T, E]"""
        silu_mul = activation.silu_mul_triton if self.backend == "triton" else activation.silu_mul
        return self._linear(silu_mul(self._linear(x, layer.gate_up)), layer.down)

    # Looked up in their modules at every call, so that a lesson's function can take their place.

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = rms_norm.rms_norm_triton if self.backend == "triton" else rms_norm.rms_norm
        return norm(x, weight, self.config.rms_norm_eps)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        add_norm = rms_norm.add_rms_norm_triton if self.backend == "triton" else rms_norm.add_rms_norm
        return add_norm(x, residual, weight, self.config.rms_norm_eps)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return (linear.linear_triton if self.backend == "triton" else linear.linear)(x, weight, bias)
