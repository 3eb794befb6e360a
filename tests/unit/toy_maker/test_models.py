"""The model that is trained is the one that labkit runs; training goes on where it was; the baseline is right."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_maker import training
from toy_maker.documents import document, small_talk
from toy_maker.evaluation import distinct_4, tokens_a_step
from toy_maker.model import DRAFT, TARGET, Llama, export
from toy_maker.ngram import Ngram
from toy_maker.settings import OutOfTime, Settings
from toy_maker.tokenizer import TEMPLATE, render, train_tokenizer

from labkit import LLM, SamplingParams
from labkit.models.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["Once upon a time there was a fox."] * 3, 300)


def test_sizes_are_within_their_bounds() -> None:
    assert 4e6 < Llama(TARGET, 4000).num_parameters() < 6e6
    assert Llama(DRAFT, 4000).num_parameters() <= 0.6e6
    assert TARGET.heads > TARGET.kv_heads


def test_labkit_says_the_same_of_the_exported_folder(tmp_path: Path, tokenizer: Any) -> None:
    torch.manual_seed(0)
    model = Llama(DRAFT, tokenizer.get_vocab_size())
    for weight in model.parameters():
        weight.data = (weight.data * 5).half().float()  # far from even, and exact in float16
    export(model, tokenizer, tmp_path)
    assert open_checkpoint(str(tmp_path)).num_parameters == model.num_parameters()
    ids = tokenizer.encode("Once upon a time there was a fox. there was a fox.").ids
    with LLM(str(tmp_path), device="cpu", dtype="float32", quiet=True) as llm:
        [output] = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    expected = model(torch.tensor([ids]))[0].log_softmax(-1).detach()
    assert output.prompt_logprobs is not None
    for place, token in enumerate(ids[1:], start=1):
        entry = output.prompt_logprobs[place]
        assert entry is not None and entry[token].logprob == pytest.approx(float(expected[place - 1, token]), abs=1e-4)


def make_settings(tmp_path: Path, **fields: Any) -> Settings:
    return Settings(work=tmp_path, out=tmp_path / "out", device="cpu", **fields)


def losses_of(trainer: training.Trainer) -> list[float]:
    ids = torch.arange(40).reshape(2, 20)
    generator = [torch.Generator().manual_seed(step) for step in range(100)]
    trainer.run(
        lambda model, step: training.next_token_loss(
            model, ids + int(torch.randint(9, (1,), generator=generator[step]))
        ),
        lambda model: 0.0,
    )
    return [point["loss"] for point in trainer.curve]


def test_training_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    def trainer(settings: Settings) -> training.Trainer:
        torch.manual_seed(1)
        return training.Trainer(settings, "target", Llama(DRAFT, 64), 1e-3, 0, steps=40)

    whole = losses_of(trainer(make_settings(tmp_path / "whole")))
    with pytest.raises(OutOfTime):  # its time is over at the first look
        losses_of(trainer(make_settings(tmp_path / "parts", deadline=time.monotonic())))
    again = trainer(make_settings(tmp_path / "parts"))
    assert again.step == training.LOOK
    assert losses_of(again) == pytest.approx(whole)
    assert whole[-1] < whole[0]


def test_learning_rate_rises_stays_and_falls_to_nothing(tmp_path: Path) -> None:
    trainer = training.Trainer(make_settings(tmp_path), "target", Llama(DRAFT, 64), 1e-3, 0, steps=1000)
    shares = [trainer._share(step) for step in range(1000)]
    assert shares[0] == pytest.approx(0.01) and shares[100:600] == [1.0] * 500
    assert shares[800] == pytest.approx(0.5) and 0 < shares[999] < 0.01


def test_kneser_ney_by_hand() -> None:
    # a b a c: after a, b and c were seen once each. Lower order: a follows b only, b and c follow a only.
    a, b, c = 0, 1, 2
    model = Ngram(np.array([a, b, a, c], dtype=np.uint16), vocab_size=4, order=2)
    unigram = (1 - 0.75) / 3 + 0.75 * 3 / 3 * (1 / 4)
    bigram = (1 - 0.75) / 2 + 0.75 * 2 / 2 * unigram
    assert model.bits(np.array([a, c], dtype=np.uint16), 1) == pytest.approx(-math.log2(bigram))
    assert model.bits(np.array([c, c], dtype=np.uint16), 1) == pytest.approx(-math.log2(unigram))  # c has no follower


def test_a_five_gram_model_is_a_distribution() -> None:
    text = np.random.default_rng(0).integers(0, 6, 300).astype(np.uint16)
    model = Ngram(text, vocab_size=6)
    for begin in range(0, 200, 17):
        history = text[begin : begin + 6]
        rows = [np.append(history, np.uint16(token)) for token in range(6)]
        assert sum(2 ** -model.bits(row, 6) for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("agrees", "drafted", "counted"),
    [
        ([True] * 10, 4, (10, 2)),
        ([False] * 3, 4, (3, 3)),
        ([True, True, False, True, True], 4, (5, 2)),
        ([True, False, True], 1, (3, 2)),
    ],
)
def test_tokens_a_step(agrees: list[bool], drafted: int, counted: tuple[int, int]) -> None:
    assert tokens_a_step(agrees, drafted) == counted


def test_distinct_4() -> None:
    assert distinct_4(["a b c d e"]) == 1
    assert distinct_4(["a b c d", "a b c d"]) == 0.5


def test_documents_are_what_the_chat_template_makes() -> None:
    import random

    import jinja2

    talk = small_talk(random.Random(1))
    whole = jinja2.Environment().from_string(TEMPLATE).render(messages=talk, add_generation_prompt=False)
    assert render(talk) == whole
    one = {"ask": "Tell me a story.", "story": "Pip ran."}
    made = {document(random.Random(n), one, {"ask": "More?", "story": "Mia sat."}) for n in range(300)}
    assert "Pip ran.<|endoftext|>" in made and any("Mia sat." in text for text in made)
    assert any(text.startswith("<|im_start|>system") for text in made)
    assert all(text.count("<|im_start|>") == text.count("<|im_end|>\n") for text in made)
