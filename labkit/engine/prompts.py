"""What people give to `generate` and `chat`, in the shapes that the engine takes."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import SamplingParams
from labkit.errors import RequestError
from labkit.models.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

A_PROMPT = "text, token ids or a dict"
MESSAGES = '[{"role": "user", "content": "Hello"}]'


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt, or a list of them, as a list. Raises RequestError."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = _as_list(prompts)
    if items is None:
        raise RequestError(f"prompts is {prompts!r}; it must be {A_PROMPT}, or a list of those", "prompt")
    return [list(map(int, items))] if items and all(map(_is_id, items)) else items


def text_and_ids(prompt: Any, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """A prompt's text, where it has one, and its token ids. Raises RequestError."""
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        return _of_dict(prompt, tokenizer)
    ids = _as_list(prompt)
    if ids is None:
        raise RequestError(f"a prompt is {A_PROMPT}, not {type(prompt).__name__}", "prompt")
    return None, _plain(ids)


def _of_dict(prompt: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    for key in prompt:
        if key not in ("prompt", "prompt_token_ids"):
            raise RequestError(
                f'a prompt has the key {key!r}; a dict is {{"prompt": text}} or {{"prompt_token_ids": ids}}', "prompt"
            )
    text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and given is None:
        raise RequestError("a prompt in a dict has neither text (prompt) nor token ids (prompt_token_ids)", "prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt is {text!r}; in a dict it must be text, and token ids prompt_token_ids", "prompt")
    if given is None:
        return text, tokenizer.encode(text or "")
    ids = _as_list(given)
    if ids is None:
        raise RequestError(f"prompt_token_ids is {given!r}; it must be a list of token ids; text is prompt", "prompt")
    return text, _plain(ids)


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, Mapping):
        raise RequestError("sampling_params is a dict; make it SamplingParams(**the_dict)", "sampling_params")
    items = _as_list(params)
    if items is None:
        raise RequestError(
            f"sampling_params is {params!r}; it must be a SamplingParams, or a list with one for each prompt",
            "sampling_params",
        )
    for item in items:
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling_params holds {item!r}; each must be a SamplingParams", "sampling_params")
    if len(items) != count:
        raise RequestError(
            f"there are {count} prompts and {len(items)} sampling_params; give one for all or one for each",
            "sampling_params",
        )
    return items


def as_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """One conversation, or a list of them, as a list. Raises RequestError."""
    items = _as_list(messages)
    if items is not None and any(isinstance(item, Mapping) for item in items):
        items = [items]
    talks = None if items is None else [_as_list(item) for item in items]
    if talks is None or not all(talk is not None and all(isinstance(m, Mapping) for m in talk) for talk in talks):
        raise RequestError(f"messages is {messages!r}; it must be a list of messages like {MESSAGES}", "messages")
    for talk in talks:
        _check_messages(talk or [])
    return [[dict(message) for message in talk or ()] for talk in talks]


def _check_messages(talk: list[Mapping[str, Any]]) -> None:
    """What a template would stumble over, in words of its own."""
    if not talk:
        raise RequestError(f"a conversation has no messages; it is {MESSAGES}", "messages")
    for place, message in enumerate(talk):
        for key, kinds in (("role", str), ("content", (str, Sequence))):
            if not isinstance(message.get(key), kinds):
                found = repr(message[key]) if key in message else "missing"
                raise RequestError(f"messages[{place}].{key} is {found}; a message is like {MESSAGES}", "messages")


def _as_list(value: Any) -> list[Any] | None:
    """Also of an array or a tensor. None of anything that is no sequence, and of text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)) else None


def _is_id(item: object) -> bool:
    return isinstance(item, numbers.Integral) and not isinstance(item, bool)  # NumPy's integers are Integral, too


def _plain(ids: list[Any]) -> list[int]:
    """Python's own integers; what is no integer is left for the engine's limits to refuse."""
    if set(map(type, ids)) <= {int}:  # as nearly always: a long prompt would take milliseconds one by one
        return ids
    return [int(item) if _is_id(item) else item for item in ids]
