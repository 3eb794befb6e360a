"""Small checkpoints for tests: random ones of each family, ones whose answers are known beforehand, and GGUF files.

Random weights are scaled so that attention is sharp and logits spread: a wrong position, a wrong head or a lost bias
then moves the logits by whole units and not by 1e-3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]  # ids 0 to 4
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = [
    "the quick brown fox jumps over the lazy dog, and then the other dog jumps over the fox",
    "once upon a time there was a small model that read and wrote and counted: 1, 2, 3, 2024",
    "what is the capital of the moon? there's none; we'll look again — über naïve 漢字 😀",
] * 4
_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 347,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 20},
    # seven query heads to one KV head, as in Qwen2.5-0.5B
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 112,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "use_sliding_window": False,
    },
    # a head size that is not hidden / heads, as in Qwen3-0.6B
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
}
FAMILIES = tuple(_FAMILY)


def config_json(family: str = "llama", **fields: Any) -> dict[str, Any]:
    """The contents of a config.json; a field given as ... is left out."""
    data = {"model_type": family, **_BASE, **_FAMILY[family], **fields}
    return {name: value for name, value in data.items() if value is not ...}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of transformers' classes, written down here again on purpose."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    rows = {"q": heads * head, "k": config["num_key_value_heads"] * head, "v": config["num_key_value_heads"] * head}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, count in rows.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (count, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (count,)
        if config["model_type"] == "qwen3":
            shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (head,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, heads * head)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_weights(config: dict[str, Any], seed: int = 4177) -> dict[str, Tensor]:
    """Seeded weights under transformers' names, float32."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes_of(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            state[name] = (1 + 0.25 * noise).clamp_min(0.2)
        elif name.endswith("bias"):
            state[name] = 0.5 * noise
        elif "embed_tokens" in name:
            state[name] = noise * (2.5 / math.sqrt(shape[1]) if config.get("tie_word_embeddings") else 1.0)
        else:
            gain = 1.7 if "q_proj" in name or "k_proj" in name else 2.5 if "lm_head" in name else 1.0
            state[name] = noise * gain / math.sqrt(shape[1])
    return state


def byte_tokenizer(size: int = 320) -> Tokenizer:
    """Byte-level BPE of exactly `size` entries, the five specials first. Any text goes there and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def word_tokenizer(size: int) -> Tokenizer:
    """`size` words: the five specials, then w5, w6 …; joined by spaces."""
    names = (SPECIALS + [f"w{i}" for i in range(5, size)])[:size]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS if word in names])
    return tokenizer


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")


def edit_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; a field given as ... is removed."""
    data = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    write_json(path, {name: value for name, value in data.items() if value is not ...})


def write_weights(folder: Path, state: dict[str, Tensor], shards: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """model.safetensors, or shards with their index."""
    state = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = list(state)[number::shards]
        save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    size = sum(tensor.nbytes for tensor in state.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_tokenizer(folder: Path, tokenizer: Tokenizer, eos: int | list[int] = 2, **fields: Any) -> None:
    """tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        **fields,
    }
    write_json(folder / "tokenizer_config.json", {name: value for name, value in config.items() if value is not ...})
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    state: dict[str, Tensor] | None = None,
    tokenizer: Tokenizer | None = None,
    eos: int | list[int] = 2,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """A folder in Hugging Face layout. `fields` are those of config.json; the tokenizer has 320 entries or fewer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json(family, **{"torch_dtype": str(dtype).removeprefix("torch."), **fields})
    write_json(folder / "config.json", config)
    write_weights(folder, random_weights(config) if state is None else state, shards, dtype)
    write_tokenizer(folder, tokenizer or byte_tokenizer(min(config["vocab_size"], 320)), eos)
    return folder


def write_table_model(
    folder: Path, table: Tensor, *, tokenizer: Tokenizer | None = None, eos: int | list[int] = 2
) -> Path:
    """A llama whose next-token logits are a table [V, V]: row = last token, column = next token.

    Embeddings are one-hot and the last projections of attention and MLP are zero, so nothing else has a say.
    """
    vocab = table.shape[0]
    hidden = max(64, -(-vocab // 64) * 64)
    config = config_json(hidden_size=hidden, vocab_size=vocab, num_hidden_layers=1)
    state = random_weights(config)
    for name in state:
        if "norm" in name:
            state[name] = torch.ones_like(state[name])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name] = torch.zeros_like(state[name])
    state["model.embed_tokens.weight"] = torch.eye(vocab, hidden)
    norm_gain = 1 / math.sqrt(1 / hidden + config["rms_norm_eps"])  # what RMSNorm makes of the 1 in a one-hot row
    state["lm_head.weight"] = torch.cat([table.T / norm_gain, torch.zeros(vocab, hidden - vocab)], dim=1)
    return write_checkpoint(
        folder,
        state=state,
        tokenizer=tokenizer or word_tokenizer(vocab),
        eos=eos,
        hidden_size=hidden,
        vocab_size=vocab,
        num_hidden_layers=1,
    )


def write_scripted_model(
    folder: Path, pieces: Sequence[bytes | str], *, repeat: bool = False, sharp: float = 30.0
) -> tuple[Path, list[int]]:
    """A model that says `pieces` one after the other, whatever the prompt's end was; then EOS, or from the start.

    A piece is a token of its own: a string or raw bytes, so a character may lie across tokens.

    Returns:
        The folder, and the ids of the pieces.
    """
    letters = bytes_to_letters()
    vocabulary = {token: i for i, token in enumerate(SPECIALS)}
    for byte in range(256):
        vocabulary[letters[byte]] = len(vocabulary)
    ids = []
    for piece in pieces:
        token = "".join(letters[byte] for byte in (piece.encode() if isinstance(piece, str) else piece))
        ids.append(vocabulary.setdefault(token, len(vocabulary)))
    assert len(set(ids)) == len(ids), "the next token depends on the last alone, so a piece may stand only once"
    vocab = len(vocabulary) + 1
    table = torch.zeros(vocab, vocab)
    table[:, ids[0]] = sharp
    for here, following in zip(ids, [*ids[1:], ids[0] if repeat else 2]):
        table[here] = 0
        table[here, following] = sharp
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return write_table_model(folder, table, tokenizer=tokenizer), ids


def bytes_to_letters() -> dict[int, str]:
    """GPT-2's letter for each byte, as the `tokenizers` library has them."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in keep]
    return {byte: chr(byte) for byte in keep} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_PARTS[part]}.{kind}"


def interleaved_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """q and k rows as llama.cpp's converter writes them for `llama`: from (0, D/2), (1, D/2+1) … to neighbours."""
    half = values.shape[0] // heads // 2
    return values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    state: dict[str, Tensor],
    kind: str = "F32",
    *,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    raw: dict[str, np.ndarray] | None = None,
    alignment: int | None = None,
) -> dict[str, Tensor]:
    """A GGUF file as llama.cpp's converter writes it.

    Args:
        kind: how matrices are stored; vectors are always F32.
        metadata: keys to add or change; None removes one.
        extra: more tensors, under their GGUF names.
        raw: ready bytes for matrices that the gguf package cannot quantise (K-quants), by Hugging Face name.

    Returns:
        The numbers that the file stands for, by Hugging Face name.
    """
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in {**_gguf_metadata(arch, config), **(metadata or {})}.items():
        if value is not None:
            _add(writer, key, value)
    held = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in state.items():
        values, stored = tensor.float().numpy(), gguf_name(name)
        swap = heads.get(stored.split(".")[-2]) if arch == "llama" else None
        if swap:
            values = interleaved_rows(values, swap)
        matrix = gguf.GGMLQuantizationType[kind]
        quant = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else matrix
        data = raw[name] if raw and name in raw else gguf.quantize(np.ascontiguousarray(values), quant)
        writer.add_tensor(stored, data, raw_dtype=quant)
        back = np.array(gguf.dequantize(data, quant), dtype=np.float32).reshape(values.shape)
        if swap:
            half = values.shape[0] // swap // 2
            back = back.reshape(swap, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
        held[name] = torch.from_numpy(np.ascontiguousarray(back))
    for stored, values in (extra or {}).items():
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _gguf_metadata(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    model = json.loads(byte_tokenizer(min(320, config["vocab_size"])).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), config["vocab_size"])]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head,
        f"{arch}.attention.value_length": head,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config["rope_theta"]),
        f"{arch}.rope.dimension_count": head,
        f"{arch}.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIALS else 5 if t.startswith("[PAD") else 1 for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
