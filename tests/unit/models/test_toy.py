"""The models that come with labkit: small, the same bytes whenever they are made, and fit for use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.models.checkpoint import open_checkpoint

DATA = Path(__file__).resolve().parents[3] / "data"


@pytest.mark.parametrize(("name", "megabytes"), [("toy", 3), ("toy-draft", 1)])
def test_small_and_said_to_be_random(name: str, megabytes: int) -> None:
    assert sum(path.stat().st_size for path in (DATA / name).iterdir()) < megabytes * 1_000_000
    card = (DATA / name / "README.md").read_text()
    assert "**random**" in card
    assert f"{open_checkpoint(name).num_parameters / 1e6:.2f} million" in card


def test_made_again_they_are_the_same_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DATA / "make_toy.py"), "--out", str(tmp_path)], check=True)
    for name in ("toy", "toy-draft"):
        made = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        kept = {path.name: path.read_bytes() for path in (DATA / name).iterdir() if path.name != "README.md"}
        assert made.keys() == kept.keys()
        assert [file for file in made if made[file] != kept[file]] == []


def test_draft_and_toy_share_a_tokenizer_in_which_every_text_goes_there_and_back() -> None:
    toy, draft = open_checkpoint("toy").tokenizer, open_checkpoint("toy-draft").tokenizer
    assert toy.vocab_size == draft.vocab_size == 2048
    for text in ("Once upon a time", "漢字 😀\r\n\t", "2024", " a  b "):
        ids = toy.encode(text)
        assert toy.decode(ids) == text and draft.encode(text) == ids
    assert len(toy.encode("Once upon a time there was a little dog")) < 15
    ids = toy.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and 2 in ids and toy.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


@pytest.mark.parametrize("name", ["toy", "toy-draft"])
def test_numbers_are_neither_flat_nor_wild(name: str) -> None:
    weights = open_checkpoint(name).load(torch.float32, torch.device("cpu"))
    logits = (
        torch.nn.functional.rms_norm(torch.randn(64, weights.norm.shape[0]), weights.norm.shape) @ weights.lm_head.T
    )
    assert 2 < logits.std() < 4
