"""What a client gets back: from the engine's outputs to the JSON of OpenAI's API, whole or in chunks.

One class for each of the two APIs. Both turn a choice into a piece, which is all of it that was not given out yet:
a whole answer is one piece, a stream is several, so that a stream joined together is the whole answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.models.tokenizer import Tokenizer
from labkit.outputs import CompletionOutput, Logprob, RequestOutput

LOWEST = -9999.0  # JSON has no -inf

Scores = dict[int, Logprob]
Scored = tuple[int, Scores | None]  # a token and what the model thought there; None for the first of a prompt


@dataclass
class Piece:
    """Part of a choice. `logprobs` is in the API's own shape, None when none were asked for or none are new."""

    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class Progress:
    """How much of one choice was given out.

    Args:
        logprobs: writes them in the API's shape; None when they were not asked for.
        echo: the prompt's text, to be put in front.
    """

    def __init__(self, logprobs: ChatLogprobs | TextLogprobs | None, echo: str | None = None):
        self._logprobs = logprobs
        self._echo = echo
        self._echoed = echo is None
        self._characters = 0
        self._tokens = 0
        self._ended = False

    def take(self, output: RequestOutput, choice: CompletionOutput) -> Piece | None:
        """All that is new in the choice; None while there is nothing to tell."""
        if self._ended:
            return None
        text = ""
        scored: list[Scored] = []
        if not self._echoed:
            if not self._prompt_is_scored(output):
                return None
            self._echoed, text = True, self._echo or ""
            scored += zip(output.prompt_token_ids, output.prompt_logprobs or ())
        text += choice.text[self._characters :]
        scored += zip(choice.token_ids[self._tokens :], (choice.logprobs or ())[self._tokens :])
        if not (text or scored or choice.finish_reason):
            return None
        self._characters, self._tokens = len(choice.text), len(choice.token_ids)
        self._ended = choice.finish_reason is not None
        logprobs = self._logprobs.write(scored) if self._logprobs is not None and scored else None
        return Piece(text, logprobs, choice.finish_reason, choice.stop_reason)

    def _prompt_is_scored(self, output: RequestOutput) -> bool:
        return output.finished or len(output.prompt_logprobs or output.prompt_token_ids) >= len(output.prompt_token_ids)


class ChatLogprobs:
    """{content: [{token, logprob, bytes, top_logprobs}]}"""

    def __init__(self, tokenizer: Tokenizer, top: int):
        self._tokenizer = tokenizer
        self._top = top

    def write(self, scored: Sequence[Scored]) -> dict[str, Any]:
        content = []
        for token, scores in scored:
            assert scores is not None  # only a prompt has a token without
            top = [self._entry(t, score) for t, score in best(scores, self._top)]
            content.append({**self._entry(token, scores[token]), "top_logprobs": top})
        return {"content": content}

    def _entry(self, token: int, score: Logprob) -> dict[str, Any]:
        own = self._tokenizer.token_bytes(token)
        return {
            "token": own.decode("utf-8", "replace"),
            "logprob": max(score.logprob, LOWEST),
            "bytes": list(own),
        }


class TextLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset}; the offset says where in the text a token begins."""

    def __init__(self, tokenizer: Tokenizer, top: int, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._top = top
        self._skip_special = skip_special_tokens
        # Of a character that is several tokens, each begins where the character does.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, scored: Sequence[Scored]) -> dict[str, Any]:
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, scores in scored:
            out["tokens"].append(self._text(token))
            out["token_logprobs"].append(None if scores is None else max(scores[token].logprob, LOWEST))
            out["top_logprobs"].append(None if scores is None else self._top_of(token, scores))
            out["text_offset"].append(self._offset)
            if not (self._skip_special and self._tokenizer.is_special(token)):
                self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return out

    def _top_of(self, token: int, scores: Scores) -> dict[str, float]:
        """Text to logprob, the chosen token always in it. Two tokens may have the same text: the likelier counts."""
        top: dict[str, float] = {}
        for candidate, score in best(scores, self._top):
            top.setdefault(self._text(candidate), max(score.logprob, LOWEST))
        top[self._text(token)] = max(scores[token].logprob, LOWEST)
        return top

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


def best(scores: Scores, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens, the most likely first."""
    return sorted(scores.items(), key=lambda item: item[1].rank)[:count]


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Each prompt once, and all choices."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ChatApi:
    """The shapes of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """What every choice of a stream begins with."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def content(self, index: int, piece: Piece) -> dict[str, Any]:
        return {**self._delta(index, {"content": piece.text}), "logprobs": piece.logprobs}

    def last(self, index: int, piece: Piece) -> dict[str, Any]:
        return {**self._delta(index, {}), "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}

    def _delta(self, index: int, delta: dict[str, str]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class TextApi:
    """The shapes of /v1/completions."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    def content(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"index": index, "text": piece.text, "logprobs": piece.logprobs, "finish_reason": None}

    def last(self, index: int, piece: Piece) -> dict[str, Any]:
        return self.choice(index, Piece("", None, piece.finish_reason, piece.stop_reason))
