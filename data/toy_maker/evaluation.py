"""What is measured of the models, as numbers for the cards: measured.json.

Bits per byte counts the same bytes for every model: those of the held-out stories, each in the model's own chat
format behind the same request. The end of the answer is not counted, since it is no text.
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit import LLM, SamplingParams
from labkit.bench.machine import describe_machine
from toy_maker import documents
from toy_maker.draft import engine
from toy_maker.files import read_json, write_json
from toy_maker.filtering import held_out_stories
from toy_maker.model import DRAFT, Llama
from toy_maker.ngram import Ngram
from toy_maker.prompts import SEED
from toy_maker.settings import Settings
from toy_maker.stories import REQUEST, SYSTEM
from toy_maker.tokenizer import load as load_tokenizer
from toy_maker.training import facts_of, load_model, vocab_size

DRAFTED = 4
TEMPERATURE = 0.8
TRANSCRIPTS = (
    "Tell me a story about a dragon.",
    "Tell me a story about a shy fox who finds a lost key.",
    "Tell me a story about two friends and a storm.",
    "Tell me a story about a girl named Anna.",
    "Tell me a story about friendship.",
    "Tell me a story about a robot who wants a friend.",
    "Tell me a story about a brave little mouse.",
    "Tell me a story about a king and a cat.",
    "Tell me a story about a boy who cannot sleep.",
    "Tell me a story about the sea.",
)
Messages = list[dict[str, str]]


def bits_per_byte(llm: LLM, talks: Sequence[Messages], stories: Sequence[str]) -> float:
    """Of the stories, each behind its messages, through the engine."""
    prompts, firsts = [], []
    for talk, story in zip(talks, stories):
        asked = llm.tokenizer.apply_chat_template([dict(one) for one in talk])
        prompts.append(asked + llm.tokenizer.encode(story, add_special_tokens=False))
        firsts.append(len(asked))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False))
    nats = 0.0
    for output, first in zip(outputs, firsts):
        assert output.prompt_logprobs is not None
        scored = zip(output.prompt_token_ids[first:], output.prompt_logprobs[first:])
        nats -= sum(entry[token].logprob for token, entry in scored if entry is not None)
    return nats / math.log(2) / sum(len(story.encode()) for story in stories)


def ngram_bits_per_byte(settings: Settings, stories: Sequence[dict[str, Any]]) -> float:
    """The same of a 5-gram model of the training documents."""
    tokens, _ = documents.load_tokens(settings, "train")
    model = Ngram(tokens[: settings.ngram_tokens], vocab_size(settings))
    backend = load_tokenizer(settings)
    bits = 0.0
    for one in stories:
        asked = backend.encode(f"<|im_start|>user\n{one['ask']}<|im_end|>\n<|im_start|>assistant\n").ids
        told = backend.encode(one["story"]).ids
        bits += model.bits(np.array(asked + told, dtype=np.uint16), len(asked))
    return bits / sum(len(one["story"].encode()) for one in stories)


def distinct_4(texts: Sequence[str]) -> float:
    """Different runs of four words over all of them, in all texts together."""
    grams = [gram for text in texts for gram in zip(*(text.split()[i:] for i in range(4)))]
    return len(set(grams)) / max(1, len(grams))


def tokens_a_step(agrees: Sequence[bool], drafted: int) -> tuple[int, int]:
    """(tokens, target steps) when `drafted` tokens are drafted for each step of a greedy target.

    Args:
        agrees: for each token of the target's answer, whether the draft, led by the target's tokens, says the same.
            That is all there is to know: what is accepted is a prefix, and up to there the draft saw the same tokens.

    >>> tokens_a_step([True, True, False, True, True], 4)  # two accepted and one of the target's own, then two
    (5, 2)
    """
    at = steps = 0
    while at < len(agrees):
        ahead = itertools.takewhile(bool, agrees[at : at + drafted])
        at += len(list(ahead)) + 1
        steps += 1
    return len(agrees), steps


@torch.no_grad()
def acceptance(settings: Settings, answers: Sequence[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Of the draft on greedy answers of the target: (prompt, answer) in tokens."""
    draft = load_model(settings, "draft", Llama(DRAFT, vocab_size(settings)))
    tokens = steps = agreed = 0
    for prompt, answer in answers:
        row = torch.tensor([prompt + answer[:-1]], device=settings.device)
        said = draft(row)[0, len(prompt) - 1 :].argmax(dim=-1).tolist()
        agrees = [a == b for a, b in zip(said, answer)]
        counted = tokens_a_step(agrees, DRAFTED)
        tokens, steps, agreed = tokens + counted[0], steps + counted[1], agreed + sum(agrees)
    return {"tokens_a_step": tokens / steps, "agreement": agreed / tokens, "drafted": DRAFTED, "prompts": len(answers)}


def ask(llm: LLM, texts: Sequence[str], params: SamplingParams | list[SamplingParams]) -> list[Any]:
    return llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=False)


def speed(llm: LLM, tokens: int) -> float:
    """Tokens a second of one stream, the best of three after a warm-up."""
    params = SamplingParams(temperature=TEMPERATURE, seed=1, max_tokens=tokens, ignore_eos=True)
    rates = []
    for _ in range(4):
        begun = time.perf_counter()
        ask(llm, TRANSCRIPTS[:1], params)
        rates.append(tokens / (time.perf_counter() - begun))
    return round(max(rates[1:]), 1)


def machine(settings: Settings) -> dict[str, Any]:
    """Where and when, for the card."""
    found = describe_machine()
    return {
        "gpu": found.gpus[0].name if found.gpus else None,
        "cpu": found.cpu,
        "cores": found.cores,
        "torch": found.packages["torch"],
        "commit": (settings.commit or found.commit or "unknown")[:9],
        "day": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _samples(settings: Settings, llm: LLM, asks: list[str]) -> dict[str, Any]:
    """Texts for the card, and how varied many of them are."""
    longest = settings.longest

    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=TEMPERATURE, seed=seed, max_tokens=longest)

    six = ask(llm, asks[:6], [params(seed) for seed in range(1, 1 + len(asks[:6]))])
    ten = ask(llm, TRANSCRIPTS, [params(seed) for seed in range(1, 11)])
    asks = asks[: settings.eval_samples]
    many = ask(llm, asks, [params(SEED + i) for i in range(len(asks))])
    texts = [one.outputs[0].text for one in many]
    return {
        "samples": [_told(i, text, one) for i, (text, one) in enumerate(zip(asks, six), start=1)],
        "transcripts": [_told(i, text, one) for i, (text, one) in enumerate(zip(TRANSCRIPTS, ten), start=1)],
        "distinct_4": {
            "within_a_sample": float(np.mean([distinct_4([text]) for text in texts])),
            "six_samples": distinct_4([one.outputs[0].text for one in six]),
            "all_samples": distinct_4(texts),
            "number": len(texts),
        },
        "ended": sum(one.outputs[0].finish_reason == "stop" for one in many) / len(many),
    }


def _told(seed: int, text: str, output: Any) -> dict[str, Any]:
    answer = output.outputs[0]
    return {"seed": seed, "prompt": text, "text": answer.text, "finish_reason": answer.finish_reason}


def _teachers(settings: Settings, stories: list[dict[str, Any]]) -> dict[str, float]:
    texts = [one["story"] for one in stories]
    fields: dict[str, Any] = {"dtype": settings.dtype, "num_kv_blocks": 2000, "max_model_len": 1024}
    with LLM(settings.teacher, device=settings.device, quiet=True, **fields) as llm:
        bare = [[{"role": "user", "content": one["ask"]}] for one in stories]
        full = [
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": REQUEST.format(one["subject"])}]
            for one in stories
        ]
        return {"teacher": bits_per_byte(llm, bare, texts), "teacher_own_prompt": bits_per_byte(llm, full, texts)}


def evaluate(settings: Settings) -> None:
    """The stage: work/measured.json."""
    path = settings.work / "measured.json"
    if path.exists():
        return
    stories = list(itertools.islice(held_out_stories(settings), max(settings.eval_stories, settings.eval_prompts, 6)))
    scored = stories[: settings.eval_stories]
    asks = [one["ask"] for one in stories]
    measured: dict[str, Any] = {"trained": True, "machine": machine(settings), "teacher": settings.teacher}
    with engine(settings, settings.folder("target") / "model") as llm:
        talks = [[{"role": "user", "content": one["ask"]}] for one in scored]
        bits = {"toy": bits_per_byte(llm, talks, [one["story"] for one in scored])}
        measured |= _samples(settings, llm, asks)
        greedy = ask(llm, asks[: settings.eval_prompts], SamplingParams(temperature=0, max_tokens=settings.longest))
        measured["speed"] = [
            {"tokens_a_second": speed(llm, min(64, settings.longest)), "dtype": settings.dtype, **machine(settings)}
        ]
    measured["acceptance"] = acceptance(settings, [(one.prompt_token_ids, one.outputs[0].token_ids) for one in greedy])
    bits |= _teachers(settings, scored)
    bits["five_gram"] = ngram_bits_per_byte(settings, scored)
    measured["bits_per_byte"] = bits
    measured["scored"] = {"stories": len(scored), "bytes": sum(len(one["story"].encode()) for one in scored)}
    measured["stories"] = read_json(settings.folder("clean") / "counts.json")
    measured["story_tokens"] = facts_of(settings, "tokens")["story_tokens"]
    measured["target"], measured["draft"] = facts_of(settings, "target"), facts_of(settings, "draft")
    write_json(path, measured)
    print(f"bits per byte {bits}; {measured['acceptance']}; {measured['distinct_4']}")


def measure_cpu_speed(settings: Settings, folder: Path) -> dict[str, Any]:
    """One stream of a model on this machine's CPU."""
    with LLM(str(folder), device="cpu", quiet=True) as llm:
        return {"tokens_a_second": speed(llm, 128), "dtype": "float32", **machine(settings), "gpu": None}
