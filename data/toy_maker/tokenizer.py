"""The toy's tokenizer: byte-level BPE, so every text comes back as it was, with ChatML's specials and template."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from toy_maker import words
from toy_maker.files import atomically, write_json
from toy_maker.filtering import training_stories
from toy_maker.settings import Settings

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
END_OF_TEXT, IM_START, IM_END = range(3)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
TRAINING_STORIES = 40_000  # more change nothing but the time


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """All 256 bytes are tokens; digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render(messages: list[dict[str, str]]) -> str:
    """As the template does, without the words that ask for an answer."""
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)


def tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[IM_START],
        "eos_token": SPECIALS[IM_END],
        "unk_token": SPECIALS[END_OF_TEXT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": TEMPLATE,
    }


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    atomically(folder / "tokenizer.json", lambda part: tokenizer.save(str(part), pretty=False))
    write_json(folder / "tokenizer_config.json", tokenizer_config(context))


def make_tokenizer(settings: Settings) -> None:
    """The stage: work/tokenizer/tokenizer.json, from stories, requests and the small talk."""
    path = settings.folder("tokenizer") / "tokenizer.json"
    if path.exists():
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    stories = itertools.islice(training_stories(settings), TRAINING_STORIES)
    texts = (text for one in stories for text in (one["story"], one["ask"]))
    talk = [*words.GREETINGS, *words.WHO, *words.THANKS, *words.MORE, *words.OTHER, *words.SYSTEMS]
    names = [f" {name} said {name}" for name in words.GIRL_NAMES + words.BOY_NAMES + words.PET_NAMES]
    roles = ["system\n", "user\n", "assistant\n"]
    tokenizer = train_tokenizer(itertools.chain(texts, 50 * talk, 50 * names, 200 * roles), settings.vocab_size)
    atomically(path, lambda part: tokenizer.save(str(part), pretty=False))
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries")


def load(settings: Settings) -> Tokenizer:
    return Tokenizer.from_file(str(settings.folder("tokenizer") / "tokenizer.json"))
