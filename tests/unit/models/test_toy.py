"""The models that come with labkit: small, trained, and as good as their cards say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import LLM, SamplingParams
from labkit.models.checkpoint import open_checkpoint

DATA = Path(__file__).resolve().parents[3] / "data"
NAMES = ("toy", "toy-draft")


def measured() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((DATA / "toy" / "measured.json").read_text())
    return numbers


@pytest.fixture(scope="module")
def toy() -> Iterator[LLM]:
    with LLM("toy", device="cpu", quiet=True) as llm:
        yield llm


def ask(llm: LLM, *texts: str, **params: Any) -> list[Any]:
    talks = [[{"role": "user", "content": text}] for text in texts]
    return [one.outputs[0] for one in llm.chat(talks, SamplingParams(max_tokens=400, **params), use_tqdm=False)]


@pytest.mark.parametrize(
    ("name", "megabytes", "least", "most"), [("toy", 12, 4e6, 6e6), ("toy-draft", 1.5, 0.2e6, 0.6e6)]
)
def test_small(name: str, megabytes: float, least: float, most: float) -> None:
    files = [path for path in (DATA / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= megabytes * 1e6
    checkpoint = open_checkpoint(name)
    assert least <= checkpoint.num_parameters <= most
    assert checkpoint.config.num_kv_heads < checkpoint.config.num_heads and checkpoint.config.dtype == "float16"


@pytest.mark.parametrize("name", NAMES)
def test_the_card_says_what_was_measured(name: str) -> None:
    card = (DATA / name / "README.md").read_text()
    numbers = measured()
    assert f"{open_checkpoint(name).num_parameters / 1e6:.2f} million" in card or name == "toy-draft"
    assert f"{numbers['acceptance']['tokens_a_step']:.2f} tokens" in card
    assert "license: apache-2.0" in card and "loss.png" in card and "make_toy.py" in card
    assert (DATA / name / "loss.png").read_bytes().startswith(b"\x89PNG")
    if name == "toy":
        assert (
            f"{numbers['bits_per_byte']['toy']:.3f}" in card and f"{numbers['bits_per_byte']['five_gram']:.3f}" in card
        )
        assert [one["seed"] for one in numbers["samples"]] == [1, 2, 3, 4, 5, 6]
        assert all(one["text"].strip() in card for one in numbers["samples"])
        assert len(list((DATA / "toy" / "transcripts").glob("*.txt"))) == 10


def test_bars() -> None:
    numbers = measured()
    bits = numbers["bits_per_byte"]
    assert bits["toy"] < 0.75 or bits["toy"] <= 1.15 * bits["teacher_own_prompt"]
    assert bits["toy"] < bits["five_gram"]
    assert numbers["distinct_4"]["within_a_sample"] > 0.85
    assert numbers["acceptance"]["drafted"] == 4 and numbers["acceptance"]["tokens_a_step"] >= 2.2
    assert numbers["story_tokens"] >= 15e6
    assert numbers["ended"] > 0.9


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def test_one_tokenizer_for_both() -> None:
    toy, draft = (DATA / name / "tokenizer.json" for name in NAMES)
    assert toy.read_bytes() == draft.read_bytes()
    assert 3500 <= open_checkpoint("toy").tokenizer.vocab_size <= 4500
    assert len(open_checkpoint("toy").tokenizer.encode("Once upon a time there was a little dog")) <= 10


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_goes_there_and_back(text: str) -> None:
    tokenizer = open_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def open_tokenizer(cache: dict[str, Any] = {}) -> Any:  # noqa: B006 (opened once for all examples)
    if not cache:
        cache["toy"] = open_checkpoint("toy").tokenizer
    return cache["toy"]


def test_chat_template() -> None:
    tokenizer = open_tokenizer()
    assert [tokenizer.encode(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    talk = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    ids = tokenizer.apply_chat_template(talk)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
    )


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_it_tells_the_story_that_was_asked_for(toy: LLM) -> None:
    asks = [f"Tell me a story about a {hero}." for hero in ("dragon", "fox", "girl", "robot", "cat")]
    answers = ask(toy, *asks, temperature=0)
    told = [one for one in answers if one.finish_reason == "stop" and 50 <= len(one.text.split()) <= 300]
    assert len(told) >= 4
    assert sum(text.split()[-1].strip(".") in one.text for text, one in zip(asks, answers)) >= 4


def test_it_answers_what_a_learner_types_first(toy: LLM) -> None:
    hello, who = ask(toy, "Hello", "Who are you?", temperature=0)
    assert hello.finish_reason == who.finish_reason == "stop"
    assert "hello" in hello.text.lower() or "hi" in hello.text.lower()
    assert "Toy" in who.text and len(who.text.split()) < 60


def test_plain_text_goes_on_and_ends(toy: LLM) -> None:
    [output] = toy.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=400), use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop" and len(output.outputs[0].text.split()) > 40


def test_a_held_out_story_is_no_surprise_to_it_and_noise_is(toy: LLM) -> None:
    lines = (DATA / "toy" / "held_out.jsonl").read_text().splitlines()
    assert 100_000 < sum(len(line) + 1 for line in lines) <= 200_000
    stories = [json.loads(line)["story"] for line in lines[:10]]
    backwards = [" ".join(reversed(story.split())) for story in stories]
    assert bits_per_byte(toy, stories) < 1.0 < 2.0 < bits_per_byte(toy, backwards)


def bits_per_byte(llm: LLM, texts: list[str]) -> float:
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    rows = [zip(one.prompt_token_ids[1:], one.prompt_logprobs[1:]) for one in outputs if one.prompt_logprobs]
    nats = -sum(entry[token].logprob for row in rows for token, entry in row if entry)
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


def test_it_is_loaded_within_a_second_after_imports() -> None:
    code = (
        "import time, torch\nfrom labkit import LLM\nfrom labkit.engine import core\nbegun = time.perf_counter()\n"
        "LLM('toy', device='cpu', quiet=True).close()\nprint(time.perf_counter() - begun)"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout))
        if seconds[-1] < 1:
            return
        time.sleep(1)
    raise AssertionError(f"it took {seconds} seconds")
