"""Makes data/toy and data/toy-draft: small llama models with seeded random weights, and the tokenizer they share.

    python data/make_toy.py            # writes into data/, the same bytes each time

The text that trains the tokenizer is made here too: sentences drawn from a list of words, the frequent ones often.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 2027
VOCAB_SIZE = 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
MODELS: dict[str, dict[str, int]] = {
    "toy": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4},
    "toy-draft": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2},
}
WORDS = """
the be to of and a in that have it for not on with he as you do at this but his by from they we say her she or an will
my one all would there their what so up out if about who get which go me when make can like time no just him know take
people into year your good some could them see other than then now look only come its over think also back after use
two how our work first well way even new want because any these give day most us is are was were been had has did said
made went came saw told took got found asked looked little big small old young happy sad red blue green yellow black
white house home room door window garden tree flower grass river lake sea sand boat ship road street town city school
teacher child children boy girl mother father brother sister friend baby dog cat bird fish horse cow sheep rabbit bear
lion mouse sun moon star sky rain snow wind cloud water fire light night morning evening summer winter spring autumn
food bread milk apple cake egg soup tea sugar salt table chair bed book story picture letter paper pen word name
number question answer model token layer weight head cache block key value query attention memory page step batch
queue request engine server machine computer program function list string table number zero one two three four five
six seven eight nine ten hundred play run walk jump swim fly sing dance sleep eat drink read write draw build open
close start stop wait help find keep hold carry bring send give show tell ask answer hear listen speak call think
learn teach try need want love hope feel hard soft hot cold warm cool fast slow long short high low near far early
late full empty heavy light dark bright clean dirty strong weak brave kind funny quiet loud rich poor sweet sour fresh
deep wide thin thick round flat sharp smooth very really quite always never often sometimes again soon today tomorrow
yesterday here there everywhere together alone once upon time lived king queen prince princess castle forest mountain
hill valley bridge magic dragon witch giant gold silver treasure secret box bag ball toy hat coat shoe hand foot eye
ear nose mouth hair face heart head arm leg finger because before after while until since though although however
therefore without within between under above behind beside import return class print range while true false none self
else elif raise except finally lambda yield with open assert
""".split()
FRAMES = (
    "{} {} {} {}.",
    'The {} said, "{} {} {}!"',
    "Once upon a time there was a {} {} who {} the {}.",
    "{}, {} and {}: {}?",
    "def {}_{}({}):\n    return {}\n",
    "- {} {} ({})\n- {}\n",
    "I don't {} what {} we'll {} to the {}; it's {}.",
    "{} = {} + 1  # {} {}",
    "<{}>{}</{}> & {}",
)


def corpus(lines: int = 20_000) -> list[str]:
    """Sentences of words with Zipf's frequencies: the word of rank r about 1/r as often as the first."""
    words = list(dict.fromkeys(WORDS))
    chances = 1 / np.arange(1, len(words) + 1) ** 0.7
    rng = np.random.Generator(np.random.PCG64(SEED))
    drawn = rng.choice(len(words), size=(lines, 5), p=chances / chances.sum())
    out = []
    for number, row in enumerate(drawn):
        picked = [words[i] for i in row]
        if number % 3 == 0:
            picked[0] = picked[0].capitalize()
        out.append(FRAMES[number % len(FRAMES)].format(*picked) + (f" {number}" if number % 7 == 0 else ""))
    return out


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so every text goes there and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def config_of(sizes: dict[str, int], vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"] // 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }


def make_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random numbers, scaled so that attention is selective and logits spread (standard deviation about 3)."""
    rng = np.random.Generator(np.random.PCG64(seed))
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        numbers = rng.standard_normal((rows, columns)) * gain / math.sqrt(columns)
        return torch.from_numpy(numbers.astype(np.float16))

    def norm() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.float16)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, gain=3.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = norm()
        weights[prefix + "self_attn.q_proj.weight"] = matrix(heads * head, hidden, gain=1.5)
        weights[prefix + "self_attn.k_proj.weight"] = matrix(kv_heads * head, hidden, gain=1.5)
        weights[prefix + "self_attn.v_proj.weight"] = matrix(kv_heads * head, hidden)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, heads * head)
        weights[prefix + "post_attention_layernorm.weight"] = norm()
        weights[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner, gain=2.0)
    weights["model.norm.weight"] = norm()
    return weights


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, sizes: dict[str, int], tokenizer: Tokenizer, seed: int) -> None:
    """One folder in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(sizes, tokenizer.get_vocab_size())
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    save_file(make_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "unk_token": SPECIALS[0],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": TEMPLATE,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="where the folders go")
    out = parser.parse_args().out
    tokenizer = make_tokenizer()
    for number, (name, sizes) in enumerate(MODELS.items()):
        write_model(out / name, sizes, tokenizer, SEED + number)


if __name__ == "__main__":
    main()
