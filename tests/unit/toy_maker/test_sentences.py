"""Which sentences of the teacher's are kept."""

from __future__ import annotations

import pytest
from toy_maker.filtering import Seen, reason_against, shingles, split
from toy_maker.sentences import is_good, normalise
from toy_maker.sentences import split as sentences_of

NAMES = {"Pip", "Mia"}


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ('"Oh no! Where is it?" said Pip. He ran. And th', ['"Oh no! Where is it?" said Pip.', "He ran."]),
        ('"Stop!" She ran away', ['"Stop!"']),
        ("Half a sentence", []),
        ('He said, "I will', []),
    ],
)
def test_whole_sentences(text: str, whole: list[str]) -> None:
    assert sentences_of(text) == whole


@pytest.mark.parametrize(
    ("sentence", "good"),
    [
        ("Pip ran to the river and saw Mia.", True),
        ("Pip saw Bob.", False),  # a stranger
        ("Pip and Mia ran to the river and ran to the river.", False),  # loops
        ("Pip was very very happy.", True),
        ("Pip was happy happy.", False),
        ("He was brave and brave.", False),
        ("This story is about Pip.", False),  # talks of the story
        ("She was happy.", False),  # Pip is a he
        ("He ate 3 pies.", False),
        ("He *ran* home.", False),
        ("Pip ran home.", False),  # was there before
        ("Go.", False),
    ],
)
def test_good_sentences(sentence: str, good: bool) -> None:
    assert is_good(sentence, NAMES, {"she", "her"}, before="Once there was Pip. Pip ran home.") is good


def test_quotes_become_ascii() -> None:
    assert normalise("“It’s – fine…”") == '"It\'s - fine..."'


def story(**changes: object) -> dict[str, object]:
    body = " ".join(f"Then Pip the fox went to house number {word} and looked." for word in "abcdefgh")
    return {"number": 1, "plot": "find", "name": "Pip", "ask": "Tell me a story.", "parts": 5, "story": body} | changes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parts": 1}, "too little of the teacher's"),
        ({"story": "Pip ran."}, "length"),
        ({"name": "Mia"}, "its hero is not in it"),
        ({"story": str(story()["story"])[:-1]}, "not whole"),
        ({"story": f"{story()['story']} Pip ran. Pip ran."}, "a sentence twice"),
        ({}, "loops"),
    ],
)
def test_bad_stories_and_why(changes: dict[str, object], reason: str) -> None:
    assert reason_against(story(**changes), least_parts=3) == reason


def test_near_duplicates_are_found_whatever_their_first_words() -> None:
    seen = Seen()
    first, other = [f"one{n}" for n in range(200)], [f"two{n}" for n in range(200)]
    assert seen.is_new(1, shingles(first))
    assert not seen.is_new(2, shingles(["another", "start", *first]))
    assert seen.is_new(3, shingles(other + first[:50]))
    assert 40 < len(shingles(first)) < 90  # a third of 195


def test_no_request_is_on_both_sides_of_the_split() -> None:
    stories = [story(number=n, ask=f"Tell me a story about {n // 2 if n < 40 else n}.") for n in range(100)]
    held_out, train = split(stories, 10)
    assert len(held_out) == 10 and len(train) == 90
    assert not {one["ask"] for one in held_out} & {one["ask"] for one in train}
