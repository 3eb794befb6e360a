"""What the models are trained on: stories as chat and as plain text, talk around them, all as one row of tokens.

The loss counts every token, those of the user's too: they are few, they are what `labkit generate` may be asked to go
on with, and a model this small learns the names and things it is asked for sooner by predicting them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from toy_maker import tokenizer as tokenizers
from toy_maker import words
from toy_maker.files import atomically, write_json
from toy_maker.filtering import held_out_stories, training_stories
from toy_maker.prompts import SEED, with_article
from toy_maker.settings import Settings

PLAIN = 0.15  # share of documents that are a story and nothing else
TALK = 0.16  # with a greeting before, thanks after or another story …
SMALL = 0.04  # small talk without a story
SYSTEM = 0.12  # of the chats have a system message
ME = "I am Toy, a very small language model. I can tell you a story."
Message = dict[str, str]


def say(user: str, assistant: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _offer(rng: random.Random) -> str:
    hero = with_article(f"{rng.choice(words.TRAITS)} {rng.choice(words.ANIMALS)}")
    return rng.choice((f"Shall I tell you a story about {hero}?", f"Do you want to hear a story about {hero}?"))


def small_talk(rng: random.Random) -> list[Message]:
    """One question that is no story, and its answer."""
    kind = rng.choices(("hello", "who", "feel", "other"), (5, 3, 1, 3))[0]
    if kind == "hello":
        greeting = rng.choice(words.GREETINGS)
        return say(
            greeting, f"{rng.choice(('Hello!', 'Hi!', 'Hello there!'))} {rng.choice((ME + ' ', ''))}{_offer(rng)}"
        )
    if kind == "who":
        return say(rng.choice(words.WHO), f"{ME} {_offer(rng)}")
    if kind == "feel":
        return say(rng.choice(words.FEELINGS), f"I am fine, thank you! {_offer(rng)}")
    question = rng.choice(words.OTHER).format(n=rng.randint(1, 20), m=rng.randint(1, 20))
    sorry = rng.choice(("I do not know that. I only know how to tell stories.", "I can only tell stories."))
    return say(question, f"{sorry} {_offer(rng)}")


def _after(rng: random.Random, other: dict[str, Any]) -> list[Message]:
    """A turn that follows a story."""
    kind = rng.choices(("thanks", "more", "bye", "story"), (3, 5, 1, 2))[0]
    if kind == "thanks":
        answer = rng.choice(("You are welcome!", "I am glad you liked it!", "Thank you!"))
        return say(
            rng.choice(words.THANKS), f"{answer} {rng.choice(('Do you want to hear another one?', _offer(rng)))}"
        )
    if kind == "more":
        return say(rng.choice(words.MORE), other["story"])
    if kind == "bye":
        return say(rng.choice(words.BYES), rng.choice(("Goodbye!", "Bye! Come back soon.", "Good night!")))
    return say(other["ask"], other["story"])


def document(rng: random.Random, story: dict[str, Any], other: dict[str, Any]) -> str:
    """One document around a story; `other` is the next, should it be asked for."""
    form = rng.random()
    if form < PLAIN:
        return f"{story['story']}<|endoftext|>"
    messages = say(story["ask"], story["story"])
    if form < PLAIN + SMALL:
        messages = small_talk(rng)
    elif form < PLAIN + SMALL + TALK:
        messages = (small_talk(rng) if rng.random() < 0.4 else []) + messages
        messages += _after(rng, other) if len(messages) == 2 or rng.random() < 0.5 else []
    if rng.random() < SYSTEM:
        messages = [{"role": "system", "content": rng.choice(words.SYSTEMS)}, *messages]
    return tokenizers.render(messages)


def documents(stories: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Every story once, now and then one more as the second of a conversation."""
    rng = random.Random(SEED)
    before: dict[str, Any] | None = None
    for story in stories:
        yield document(rng, story, before or story)
        before = story


def _encode(settings: Settings, texts: list[str]) -> Iterator[NDArray[np.uint16]]:
    backend = tokenizers.load(settings)
    for begin in tqdm(range(0, len(texts), 2000), "tokens"):
        for one in backend.encode_batch_fast(texts[begin : begin + 2000], add_special_tokens=False):
            yield np.array(one.ids, dtype=np.uint16)


def _pack(settings: Settings, name: str, texts: list[str]) -> None:
    """{name}.npz: `tokens`, uint16, one document after the other, and `starts`, where each begins."""
    rows = list(_encode(settings, texts))
    lengths = np.array([len(row) for row in rows])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)

    def write(part: Any) -> None:
        with open(part, "wb") as file:
            np.savez(file, tokens=np.concatenate(rows), starts=starts)

    atomically(settings.folder("tokens") / f"{name}.npz", write)
    print(f"{name}: {len(texts)} documents, {lengths.sum():,} tokens")


def tokenize(settings: Settings) -> None:
    """The stage: tokens/train.npz and tokens/held_out.npz (chats of one story each, for the loss)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    folder = settings.folder("tokens")
    if not (folder / "held_out.npz").exists():
        stories = list(training_stories(settings))
        count = sum(map(len, _encode(settings, [one["story"] for one in stories])))
        write_json(folder / "facts.json", {"story_tokens": count})
        random.Random(SEED).shuffle(stories)
        _pack(settings, "train", list(documents(stories)))
        chats = [tokenizers.render(say(one["ask"], one["story"])) for one in held_out_stories(settings)]
        _pack(settings, "held_out", chats)


def load_tokens(settings: Settings, name: str) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    with np.load(settings.folder("tokens") / f"{name}.npz") as file:
        return file["tokens"], file["starts"]
