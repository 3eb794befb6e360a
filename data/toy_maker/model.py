"""The llama that is trained, in plain PyTorch, tensors named as Hugging Face names them; and its export as a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from toy_maker import tokenizer as tokenizers
from toy_maker.files import atomically, write_json

HEAD_DIM = 32
EPS = 1e-5
THETA = 10_000.0
LENGTH = 2048  # tokens of the longest sequence; training sees half: beyond it there is room, but no good story


@dataclass(frozen=True)
class Sizes:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int


TARGET = Sizes(hidden=256, inner=704, layers=6, heads=8, kv_heads=4)
DRAFT = Sizes(hidden=96, inner=256, layers=2, heads=3, kv_heads=1)


def rope_tables(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, HEAD_DIM], the halves alike (rotate_half's order)."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device).float() / HEAD_DIM)
    angles = torch.arange(length, device=device).float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.q_proj = nn.Linear(sizes.hidden, sizes.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(sizes.heads * HEAD_DIM, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Written out: with enable_gqa some versions leave the fast kernels.
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, eps=EPS)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, eps=EPS)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocabulary]; the head is the embedding."""

    def __init__(self, sizes: Sizes, vocab_size: int):
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(vocab_size, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, eps=EPS)
        self._init()

    def _init(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * self.sizes.layers) ** 0.5 if into_stream else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        cos, sin = rope_tables(ids.shape[1], ids.device)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self.parameters())


def hf_config(sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizers.IM_START,
        "eos_token_id": tokenizers.IM_END,
        "torch_dtype": "float16",
    }


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """A folder in Hugging Face layout, float16; what else lies in it stays."""
    folder.mkdir(parents=True, exist_ok=True)
    # save_file wants each tensor whole and on its own.
    weights = {f"model.{name}": value.detach().half().cpu().contiguous() for name, value in model.state_dict().items()}
    atomically(folder / "model.safetensors", lambda part: save_file(weights, part, metadata={"format": "pt"}))
    write_json(folder / "config.json", hf_config(model.sizes, model.embed_tokens.num_embeddings))
    ends = [tokenizers.IM_END, tokenizers.END_OF_TEXT]  # of an answer, of a plain story
    write_json(folder / "generation_config.json", {"bos_token_id": tokenizers.IM_START, "eos_token_id": ends})
    tokenizers.save(tokenizer, folder, LENGTH)
