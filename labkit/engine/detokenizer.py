"""From token ids to text, a token at a time, without ever splitting a character or showing half a stop string.

text      what the tokens so far say, up to the last whole character
visible   the same without an ending that may be the beginning of a stop string
"""

from __future__ import annotations

import bisect
import codecs
from collections.abc import Sequence

from labkit.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class ByteDecoder:
    """For byte-level vocabularies: a token is its bytes, and UTF-8 says where a character ends."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The rest, at the end: half a character becomes U+FFFD, as in a decode of the whole."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For vocabularies whose text depends on neighbours (spaces between words, byte fallback).

    Decodes a short window twice, with and without the new token; the difference is the new text. A window that
    ends in U+FFFD may be in the middle of a character, so it waits for the next token.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []  # from the beginning of the window
        self._shown = 0  # of these, how many are in the text already

    def push(self, token: int) -> str:
        self._ids.append(token)
        before = self._decode(self._ids[: self._shown])
        now = self._decode(self._ids)
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._ids[: self._shown])
        return self._decode(self._ids)[len(before) :]


class StopStrings:
    """Some strings, found in a text that grows. What a look costs hardly grows with their number.

    Attributes:
        longest: characters of the longest.
    """

    def __init__(self, strings: Sequence[str]):
        self._by_length: dict[int, set[str]] = {}
        for string in strings:
            self._by_length.setdefault(len(string), set()).add(string)
        self._sorted = sorted(strings)
        self._first = {string[0] for string in strings}
        self.longest = max(self._by_length, default=0)

    def first_in(self, text: str, begin: int) -> tuple[int, str] | None:
        """Where the earliest one begins of those that end after `begin`, and which; the shortest on a tie."""
        found = [
            (end - length, text[end - length : end])
            for end in range(begin + 1, len(text) + 1)
            for length, strings in self._by_length.items()
            if length <= end and text[end - length : end] in strings
        ]
        return min(found, default=None)

    def beginning_at_end(self, text: str) -> int:
        """Length of the longest end of the text that one of them begins with, and is longer than."""
        for start in range(max(0, len(text) - self.longest + 1), len(text)):
            if text[start] in self._first:
                end = text[start:]
                # In order of the alphabet those that begin with it follow it.
                place = bisect.bisect_right(self._sorted, end)
                if place < len(self._sorted) and self._sorted[place].startswith(end):
                    return len(end)
        return 0


class Detokenizer:
    """The text of one answer in the making, and the watch for its stop strings.

    Args:
        stop: strings that end the answer; answers of one request may share them.
        include_stop: leave the stop string in the text.
        min_tokens: stop strings that end within so many tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ):
        kind = ByteDecoder if tokenizer.is_byte_level else WindowDecoder
        self._decoder = kind(tokenizer, skip_special_tokens)
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = 0
        self.text = ""

    @property
    def visible(self) -> str:
        """What may be shown now; later calls only ever make it longer."""
        return self.text[: len(self.text) - self._held] if self._held else self.text

    def push(self, token: int, shown: bool = True) -> str | None:
        """Add a token; returns the stop string that it completed. With shown=False it counts but has no text."""
        self._num_tokens += 1
        return self._grow(self._decoder.push(token)) if shown else None

    def finish(self) -> str | None:
        """No more tokens come: shows what was held back; returns a stop string that only this completed."""
        stop = self._grow(self._decoder.flush())
        self._held = 0
        return stop

    def _grow(self, piece: str) -> str | None:
        if not piece:
            return None
        before = len(self.text)
        self.text += piece
        if self._stop is None:
            return None
        if self._num_tokens > self._min_tokens:
            # A stop string may begin in the text before, but it ends in this piece.
            found = self._stop.first_in(self.text, before)
            if found is not None:
                start, stop = found
                self.text = self.text[: start + len(stop) * self._include_stop]
                self._held = 0
                return stop
        self._held = 0 if self._include_stop else self._stop.beginning_at_end(self.text)
        return None
