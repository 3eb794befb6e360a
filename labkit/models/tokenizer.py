"""Text to token ids and back, with the `tokenizers` library doing the work and this module minding the edges:
exactly one BOS, bytes of single tokens, chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from labkit.errors import ModelError, RequestError
from labkit.models.chat_template import ChatTemplate
from labkit.models.files import check_file
from labkit.models.hf_config import read_json

LONG_TEXT = 10_000  # characters, some milliseconds of work
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's vocabulary.

    Attributes:
        vocab_size: ids that it knows: the largest id and one.
        bos_token_id, eos_token_id: None when the model has none.
        chat_template: renders messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
    ):
        backend.no_truncation()  # both may be left in tokenizer.json from training
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._add_bos = add_bos and bos_token_id is not None
        self._add_eos = add_eos and eos_token_id is not None
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._spelling = _spelling(backend)

    @property
    def is_byte_level(self) -> bool:
        """True if the text of some tokens is their bytes, one after the other, read as UTF-8."""
        return self._spelling == "byte-level"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Names of special tokens in it become those tokens, as in transformers.

        Args:
            add_special_tokens: begin with BOS (exactly one, also if the text begins with it) if the model wants one.

        Raises:
            RequestError: (a ValueError, param "prompt") for text with half a surrogate pair, which UTF-8 cannot say.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
                "which is no character; remove it",
                "prompt",
            ) from None
        ids = self._encode(text, add_special_tokens)
        if not add_special_tokens:
            return ids
        if self._add_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]  # type: ignore[list-item]
        if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]  # written in the text, and added by the tokenizer's post-processor
        if self._add_eos and ids[-1:] != [self.eos_token_id]:
            ids.append(self.eos_token_id)  # type: ignore[arg-type]
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch lets other Python threads run meanwhile; a single encode stops them all, for seconds if the text is
        # megabytes long. For short ones it is not worth it: after a batch, the library warns at every fork.
        if len(text) > LONG_TEXT:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens, spaces and all; half a character at an end becomes U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes, which may be part of a character. Ids without a token (padding) have none."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._spelling == "byte-level":
            values = [_BYTE_OF.get(letter) for letter in token]
            return token.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        if self._spelling == "byte-fallback":
            if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
                return bytes.fromhex(match[1])
            return token.replace("▁", " ").encode()
        return token.encode()

    def is_special(self, token_id: int) -> bool:
        """True for control tokens such as BOS, which decode() leaves out when asked to."""
        return token_id in self._special_ids

    def render_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt that the chat template makes of messages. Raises RequestError (param "messages")."""
        return self.chat_template.render(messages, add_generation_prompt)

    def chat_prompt(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> tuple[str, list[int]]:
        """The rendered prompt and its token ids. The template writes the BOS if the model wants one, so none is added.

        Raises:
            RequestError: (param "messages") when the template refuses them, or there is none.
        """
        text = self.render_chat(messages, add_generation_prompt)
        try:
            return text, self.encode(text, add_special_tokens=False)
        except RequestError as error:
            raise RequestError(str(error), "messages") from None

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The token ids of `chat_prompt`."""
        return self.chat_prompt(messages, add_generation_prompt)[1]


def load_tokenizer(folder: Path, bos_token_id: int | None = None, eos_token_id: int | None = None) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face layout.

    Args:
        bos_token_id, eos_token_id: config.json's, for a tokenizer_config.json that names none.

    Raises:
        ModelError: naming the file that is missing or damaged.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{path} is missing; it is the only tokenizer format that is read from a folder")
    check_file(path, most=None)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    special = _special_tokens(config)
    _add_missing_tokens(backend, config, special, config_path)
    bos, eos = (_token_id(backend, special.get(name)) for name in ("bos_token", "eos_token"))
    return Tokenizer(
        backend,
        ChatTemplate(_chat_template(folder, config), special),
        bos_token_id=bos_token_id if bos is None else bos,
        eos_token_id=eos_token_id if eos is None else eos,
        # tokenizer.json's post-processor has the say; a field that wants a BOS where it has none is heard, too
        add_bos=config.get("add_bos_token") is True and bos is not None,
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like; each is a string or an object with the string in `content`."""
    found = {name: config.get(name) for name in _NAMED_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def _token_id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], path: Path
) -> None:
    """Tokens that tokenizer_config.json lists and tokenizer.json does not; and named tokens become special."""
    listed = config.get("added_tokens_decoder") or {}
    for token_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        token = tokenizers.AddedToken(
            entry["content"],
            special=bool(entry.get("special")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            single_word=bool(entry.get("single_word")),
            normalized=bool(entry.get("normalized", True)),
        )
        if int(token_id) not in backend.get_added_tokens_decoder():
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(entry["content"]) != int(token_id):
            raise ModelError(
                f"{path}: added_tokens_decoder gives {entry['content']!r} the id {token_id}, tokenizer.json another"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in special.values():
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: a text, or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.exists():
        check_file(path)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _bytes_to_letters() -> dict[int, str]:
    """GPT-2's alphabet: each byte has a visible letter, so that a vocabulary can be a text file."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_BYTE_OF = {letter: byte for byte, letter in _bytes_to_letters().items()}


def _spelling(backend: tokenizers.Tokenizer) -> str:
    """How tokens spell bytes: GPT-2's letters, SentencePiece's ▁ and <0x0A>, or plain text."""
    layout = json.loads(backend.to_str())
    kinds = {step["type"] for step in _steps(layout.get("decoder"))}
    if "ByteLevel" in kinds:
        return "byte-level"
    if kinds & {"ByteFallback", "Metaspace"} or layout["model"].get("byte_fallback"):
        return "byte-fallback"
    return "plain"


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for inner in part.get("decoders", []) for step in _steps(inner)] or [part]
