"""Text grows by whole characters, equals the decode of the whole, and stops where a stop string is complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.detokenizer import Detokenizer, StopStrings


class Bytes:
    """A tokenizer whose tokens are the byte strings given; id 0 is special."""

    is_byte_level = True

    def __init__(self, pieces):
        self.pieces = [b"<s>", *pieces]

    def token_bytes(self, token):
        return self.pieces[token]

    def is_special(self, token):
        return token == 0

    def decode(self, ids, skip_special_tokens=True):
        raw = b"".join(self.pieces[i] for i in ids if not (skip_special_tokens and i == 0))
        return raw.decode("utf-8", "replace")


class Words(Bytes):
    """The same with spaces between the tokens: text depends on the neighbours, as with WordPiece or Metaspace."""

    is_byte_level = False

    def decode(self, ids, skip_special_tokens=True):
        raw = b" ".join(self.pieces[i] for i in ids if not (skip_special_tokens and i == 0))
        return raw.decode("utf-8", "replace")


def run(tokenizer, ids, **options):
    """(visible text after each token, final text, stop string, number of tokens read)."""
    d = Detokenizer(tokenizer, **options | ({"stop": StopStrings(options["stop"])} if "stop" in options else {}))
    seen = []
    for count, token in enumerate(ids, start=1):
        stop = d.push(token)
        seen.append(d.visible)
        if stop:
            return seen, d.visible, stop, count
    stop = d.finish()
    return seen, d.visible, stop, len(ids)


@pytest.mark.parametrize("kind", [Bytes, Words])
@given(pieces=st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=30))
def test_any_bytes_give_the_decode_of_the_whole(kind, pieces):
    tokenizer = kind(pieces)
    ids = list(range(1, len(pieces) + 1))
    if kind is Bytes:
        ids.insert(len(ids) // 2, 0)  # a special token in the middle is not text
    seen, text, _, _ = run(tokenizer, ids)
    assert text == tokenizer.decode(ids)
    assert all(text.startswith(s) for s in seen), "nothing is taken back"


@given(text=st.text(min_size=1, max_size=20), data=st.data())
def test_no_half_character_is_ever_shown(text, data):
    raw = text.encode("utf-8", "ignore")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=8)))
    pieces = [p for p in (raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)) if p]
    seen, _, _, _ = run(Bytes(pieces), list(range(1, len(pieces) + 1)))
    whole = raw.decode()
    assert seen == [s for s in seen if whole.startswith(s)] and (not seen or seen[-1] == whole)


FOX = ["The", " quick", " br", "own", " fox", " jumps"]


@pytest.mark.parametrize(
    ("stop", "shown", "tokens"),
    [("own fox", "The quick br", 5), ("T", "", 1), ("quick brown fox j", "The ", 6), (" ", "The", 2), ("!", None, 6)],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_over_token_boundaries(stop, shown, tokens, include):
    tokenizer = Bytes([p.encode() for p in FOX])
    seen, text, found, count = run(tokenizer, range(1, 7), stop=("never", stop), include_stop=include)
    whole = "".join(FOX)
    assert count == tokens
    assert found == (stop if shown is not None else None)
    assert text == (whole if shown is None else shown + stop * include)
    assert all(text.startswith(s) for s in seen), "no part of a stop string was shown before"


def test_the_earliest_of_two_that_end_together_cuts():
    tokenizer = Bytes([b"abc", b"def"])
    _, text, found, _ = run(tokenizer, [1, 2], stop=("de", "cd"))
    assert (text, found) == ("ab", "cd")


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end():
    tokenizer = Bytes([b"abc", b"de"])
    seen, text, found, _ = run(tokenizer, [1, 2], stop=("dex",))
    assert (seen, text, found) == (["abc", "abc"], "abcde", None)


def test_stop_strings_wait_for_min_tokens():
    tokenizer = Bytes([b"a"] * 6)
    _, text, found, count = run(tokenizer, range(1, 7), stop=("a",), min_tokens=4)
    assert (text, found, count) == ("aaaa", "a", 5)


def test_a_stop_string_before_min_tokens_does_not_count_later():
    tokenizer = Bytes([b"a", b"b", b"c", b"d"])
    assert run(tokenizer, range(1, 5), stop=("ab", "wxyz"), min_tokens=2)[1:3] == ("abcd", None)


def test_special_tokens_are_shown_when_asked_for():
    tokenizer = Bytes([b"a"])
    assert run(tokenizer, [1, 0], skip_special_tokens=False)[1] == "a<s>"
    assert run(tokenizer, [1, 0])[1] == "a"


SHORT = st.text("ab", min_size=1, max_size=4)


@given(strings=st.lists(SHORT, min_size=1, max_size=6), text=st.text("abc", max_size=12), begin=st.integers(0, 12))
def test_stop_strings_are_found_as_by_looking_for_each(strings, text, begin):
    stops = StopStrings(strings)
    ends = [(i, s) for s in strings for i in range(len(text)) if text.startswith(s, i) and i + len(s) > begin]
    assert stops.first_in(text, begin) == min(ends, default=None)
    beginnings = [n for n in range(1, len(text) + 1) for s in strings if len(s) > n and s.startswith(text[-n:])]
    assert stops.beginning_at_end(text) == max(beginnings, default=0)


def test_many_stop_strings_cost_little():
    """Each is in no list that a new character goes through."""
    stops = StopStrings([f"stop number {i}" for i in range(10_000)])
    assert stops.first_in("x stop number 77", 14) == (2, "stop number 7")
    assert len(stops._by_length) == 4 and len(stops._first) == 1
