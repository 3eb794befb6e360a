"""Sentences of the teacher's: how they are cut out of what it wrote, and which are good enough for a story."""

from __future__ import annotations

import itertools
import re
from collections.abc import Set

PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "...", "\u00a0": " "})
ALLOWED = re.compile(r"[A-Za-z ,.!?'\"-]+")
END = re.compile(r'[.!?]+"?(?=\s|$)')
CAPITALS_ANYWHERE = {
    "I",
    "I'm",
    "I'll",
    "I've",
    "I'd",
    "Mr",
    "Mrs",
    "Mom",
    "Dad",
    "Mommy",
    "Daddy",
    "Grandma",
    "Grandpa",
}
META = {"story", "stories", "teacher", "students", "student", "reader", "readers", "assistant", "sentence", "sentences"}
MOST_WORDS = 30


def normalise(text: str) -> str:
    """ASCII quotes and dashes."""
    return text.translate(PLAIN)


def split(text: str) -> list[str]:
    """Whole sentences; a full stop inside quotes ends none, and a tail without an end is dropped.

    >>> split('"Oh no! Where is it?" said Pip. He ran. And th')
    ['"Oh no! Where is it?" said Pip.', 'He ran.']
    """
    out, start = [], 0
    for match in END.finditer(text):
        piece = text[start : match.end()]
        after = text[match.end() :].lstrip()
        # '"Oh!" said' goes on in a small letter.
        if piece.count('"') % 2 == 0 and not (piece.endswith('"') and after[:1].islower()):
            out.append(piece.strip())
            start = match.end()
    return out


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def is_good(sentence: str, names: Set[str], wrong_words: Set[str], before: str) -> bool:
    """A simple sentence about those who are in the story, that neither loops nor repeats one that was there.

    Args:
        names: that may be in it, beside words that always have a capital.
        wrong_words: that may not.
        before: the story so far.
    """
    spoken = words(sentence)
    if not 3 <= len(spoken) <= MOST_WORDS or not ALLOWED.fullmatch(sentence) or (META | wrong_words) & set(spoken):
        return False
    if sentence in before or loops(spoken):
        return False
    return all(word.removesuffix("'s") in names | CAPITALS_ANYWHERE for word in _capitals_inside(sentence))


def loops(spoken: list[str]) -> bool:
    """The same three words twice, a word right after itself, or a longer one three times."""
    triples = list(zip(spoken, spoken[1:], spoken[2:]))
    doubled = any(a == b for a, b in itertools.pairwise(spoken) if a not in ("very", "had", "that", "ha", "so"))
    doubled = doubled or any(a == c and b == "and" for a, b, c in triples)
    content = [word for word in spoken if len(word) > 3]
    return len(set(triples)) < len(triples) or doubled or any(content.count(word) > 2 for word in set(content))


def _capitals_inside(sentence: str) -> list[str]:
    """Words with a capital that no sentence begins with."""
    return [m[1] for m in re.finditer(r"(?<=[a-z,] )\"?([A-Z][\w']*)", sentence) if '"' not in m[0]]
