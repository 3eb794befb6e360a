"""The decoder against Hugging Face transformers, which is the reference for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from labkit.config import ModelConfig, RopeConfig
from labkit.errors import KernelError
from labkit.kernels.attention_batch import AttentionBatch, PromptChunk
from labkit.models.decoder import Decoder, DecoderBatch
from labkit.models.layout import DecoderWeights, LayerWeights

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "llama-head80": ("llama", {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "mistral": ("mistral", {"sliding_window": 11}),
    "qwen2-one-kv-head": ("qwen2", {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
}


def reference(name: str, **fields: Any) -> Any:
    """A small random model of transformers whose every part matters: norms and biases are not what they start as."""
    family, own = MODELS[name]
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **(TINY | own | fields))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for key, weight in model.named_parameters():
        noise = torch.randn(weight.shape)
        if weight.ndim == 1:
            weight.data = (1 + 0.25 * noise).clamp_min(0.2) if "norm" in key else 0.5 * noise
        elif "embed_tokens" not in key:
            weight.data = noise * ((2.5 if "lm_head" in key else 1.5) / weight.shape[1] ** 0.5)
    return model


def config_of(model: Any) -> ModelConfig:
    """This project's config of a transformers model."""
    c = model.config
    rope = dict(c.rope_parameters)
    theta = rope.pop("rope_theta")
    types = getattr(c, "layer_types", None) or ["sliding_attention"] * c.num_hidden_layers
    window = getattr(c, "sliding_window", None)
    return ModelConfig(
        family=c.model_type,
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_layers=c.num_hidden_layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope=RopeConfig(theta=theta, **{k: v for k, v in rope.items() if v is not None}),
        tie_word_embeddings=c.tie_word_embeddings,
        qkv_bias=c.model_type == "qwen2",
        qk_norm=c.model_type == "qwen3",
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(2,),
    )


def weights_of(model: Any) -> DecoderWeights:
    """Its weights, merged."""
    state = {key: value.detach() for key, value in model.state_dict().items()}

    def layer(index: int) -> LayerWeights:
        def get(name: str) -> Tensor | None:
            return state.get(f"model.layers.{index}.{name}")

        def merged(*names: str) -> Any:
            parts = [get(name) for name in names]
            return None if parts[0] is None else torch.cat([part for part in parts if part is not None])

        return LayerWeights(
            input_norm=merged("input_layernorm.weight"),
            qkv=merged(*(f"self_attn.{x}_proj.weight" for x in "qkv")),
            qkv_bias=merged(*(f"self_attn.{x}_proj.bias" for x in "qkv")),
            q_norm=get("self_attn.q_norm.weight"),
            k_norm=get("self_attn.k_norm.weight"),
            output=merged("self_attn.o_proj.weight"),
            post_attention_norm=merged("post_attention_layernorm.weight"),
            gate_up=merged("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            down=merged("mlp.down_proj.weight"),
        )

    embedding = state["model.embed_tokens.weight"]
    return DecoderWeights(
        embedding=embedding,
        layers=[layer(i) for i in range(model.config.num_hidden_layers)],
        norm=state["model.norm.weight"],
        lm_head=embedding if model.config.tie_word_embeddings else state["lm_head.weight"],
    )


def decoder_of(model: Any, kernels: str = "torch") -> Decoder:
    return Decoder(config_of(model), weights_of(model), max_model_len=256, kernels=kernels)


def prompt_batch(length: int) -> AttentionBatch:
    """One prompt in one piece, its blocks in order."""
    nobody = torch.empty(0, 1, dtype=torch.int32)
    blocks = torch.arange(-(-length // 16), dtype=torch.int32)
    return AttentionBatch(torch.arange(length), nobody, torch.empty(0), 0, [PromptChunk(0, 0, length, blocks)])


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_prompt_in_one_piece_agrees_with_transformers(name: str) -> None:
    model = reference(name)
    decoder = decoder_of(model)
    config = decoder.config
    cache = torch.zeros(config.num_layers, 2, 6, 16, config.num_kv_heads, config.head_dim)
    for length in (1, 15, 16, 17, 70):
        ids = torch.randint(config.vocab_size, (length,))
        want = model(ids.unsqueeze(0)).logits[0].log_softmax(-1)
        batch = DecoderBatch(ids, torch.arange(length), prompt_batch(length))
        got = decoder.logits(decoder.forward(batch, cache)).log_softmax(-1)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_stay_near_float32(dtype: torch.dtype) -> None:
    model = reference("qwen3")
    ids = torch.randint(101, (40,))
    want = model(ids.unsqueeze(0)).logits[0].log_softmax(-1)
    decoder = decoder_of(model.to(dtype))
    cache = torch.zeros(2, 2, 6, 16, 2, 24, dtype=dtype)
    hidden = decoder.forward(DecoderBatch(ids, torch.arange(40), prompt_batch(40)), cache)
    assert hidden.dtype == dtype
    logits = decoder.logits(hidden)
    assert logits.dtype == dtype
    # Weights rounded to 8 (or 11) bits move logits of this size by some hundredths.
    assert (logits.log_softmax(-1) - want).abs().mean() < 0.1


def test_a_backend_that_is_not_there_is_refused() -> None:
    model = reference("llama")
    with pytest.raises(KernelError, match="cuda"):
        decoder_of(model, kernels="cuda")
