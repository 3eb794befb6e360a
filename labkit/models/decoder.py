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
from labkit.kernels import attention, backend, few_decodes, linear, norm_linear, qkv_rope, rms_norm, rope, tiles
from labkit.kernels.attention_batch import AttentionBatch
from labkit.models.layout import DecoderWeights, LayerWeights

INVARIANT_SPLIT = 512  # tokens of a piece of a context, when the pieces may not depend on how many sequences there are


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
        batch_invariant: a token's result is the same in every bit, whatever else is in the batch.

    Raises:
        KernelError: this backend cannot run here, or not so.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        max_model_len: int,
        kernels: str = "auto",
        batch_invariant: bool = False,
    ):
        device = weights.embedding.device
        self.config = config
        self.weights = weights
        self.backend = backend.choose(kernels, device, weights.embedding.dtype, config.head_dim)
        self.batch_invariant = batch_invariant
        if batch_invariant:
            backend.check_invariant(self.backend, device, weights.embedding.dtype)
        # None: prompts are attended to one by one
        self.prefill_tile: tiles.PrefillTile | None = None
        if self.backend == "cuda":
            self.prefill_tile = tiles.CUDA_TILE
        elif self.fused:
            group = config.num_heads // config.num_kv_heads
            self.prefill_tile = tiles.prefill_tile(weights.embedding.dtype, config.head_dim, group, device)
        self.cos_sin = rope.rope_table(config.rope, config.head_dim, max_model_len, device)

    @property
    def fused(self) -> bool:
        """Whether its operations are the GPU's fused kernels, which wait for nobody: a CUDA graph can hold them."""
        return self.backend in ("triton", "cuda", backend.FASTEST)

    def select_backend(self) -> None:
        """Operations that are called from now on are this model's."""
        backend.use(self.backend, self.batch_invariant)

    def forward(self, batch: DecoderBatch, kv_cache: Tensor) -> Tensor:
        """Runs every layer on the step's tokens.

        Args:
            kv_cache: [layers, 2, N, B, K, D], keys and values of each layer; the step's own are written into it.

        Returns:
            Hidden states [T, E], normalised, ready for `logits`.
        """
        self.select_backend()
        eps = self.config.rms_norm_eps
        residual = functional.embedding(batch.token_ids, self.weights.embedding)
        x: Tensor | None = None  # what the last block put out, not yet in the residual stream
        for index, layer in enumerate(self.weights.layers):
            qkv, residual = norm_linear.norm_linear(x, residual, layer.input_norm, eps, layer.qkv, layer.qkv_bias)
            attended = self._attention(qkv, layer, index, batch, kv_cache[index])
            x, residual = linear.linear_add(attended, layer.output, residual)
            mlp, residual = norm_linear.norm_linear(
                x, residual, layer.post_attention_norm, eps, layer.gate_up, gated=True
            )
            x, residual = linear.linear_add(mlp, layer.down, residual, any_layout=True)
        if x is None:
            return rms_norm.rms_norm(residual, self.weights.norm, eps)
        return rms_norm.add_rms_norm(x, residual, self.weights.norm, eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary: [rows, E] -> [rows, V], of the weights' type."""
        self.select_backend()
        return linear.linear(hidden, self.weights.lm_head)

    def _attention(self, qkv: Tensor, layer: LayerWeights, index: int, batch: DecoderBatch, kv_cache: Tensor) -> Tensor:
        """[T, (H + 2K) D] -> [T, H D]; kv_cache is this layer's [2, N, B, K, D]."""
        k_cache, v_cache = kv_cache.unbind(0)
        window = self.config.sliding_windows[index]
        attend = self._attend_triton if backend.on_triton() else self._attend
        return attend(qkv, layer, batch, k_cache, v_cache, window).flatten(1)

    def _attend(
        self,
        qkv: Tensor,
        layer: LayerWeights,
        batch: DecoderBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        window: int | None,
    ) -> Tensor:
        """QK-norm, RoPE and attention, one after the other: [T, (H + 2K) D] -> [T, H, D]"""
        config = self.config
        heads = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = rms_norm.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = rope.apply_rope(q, k, batch.positions, self.cos_sin)
        return attention.attention(q, k, v, k_cache, v_cache, batch.attention, window)

    def _attend_triton(
        self,
        qkv: Tensor,
        layer: LayerWeights,
        batch: DecoderBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        window: int | None,
    ) -> Tensor:
        """The same with everything before attention, and the KV store, in one kernel; of few decodes attention too."""
        if few_decodes.takes_few_decodes(qkv, batch.positions, k_cache, v_cache, batch.attention):
            return few_decodes.few_decodes(
                qkv,
                batch.positions,
                self.cos_sin,
                k_cache,
                v_cache,
                batch.attention,
                layer.q_norm,
                layer.k_norm,
                self.config.rms_norm_eps,
                window,
            )
        q = qkv_rope.norm_rope_store_triton(
            qkv,
            batch.positions,
            self.cos_sin,
            k_cache,
            v_cache,
            batch.attention.slot_mapping,
            layer.q_norm,
            layer.k_norm,
            self.config.rms_norm_eps,
        )
        split_size = INVARIANT_SPLIT if self.batch_invariant else None
        return attention.paged_attention(q, k_cache, v_cache, batch.attention, window, split_size)
