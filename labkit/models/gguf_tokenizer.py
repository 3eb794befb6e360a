"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

Two kinds are known: byte-level BPE ("gpt2", with one of several ways to cut text into words first) and
SentencePiece BPE ("llama"). Patterns and defaults: src/llama-vocab.cpp of llama.cpp; where it differs from the
model's own tokenizer.json (NFC for qwen2), the latter is followed.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from labkit.errors import ModelError
from labkit.models.chat_template import ChatTemplate
from labkit.models.gguf import GgufFile
from labkit.models.tokenizer import Tokenizer as ModelTokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type that matter here

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_PRE_TOKENIZERS = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")


def load_gguf_tokenizer(file: GgufFile) -> ModelTokenizer:
    """The tokenizer and chat template of a GGUF file.

    Raises:
        ModelError: naming the file and the key that is missing, damaged or of an unknown kind.
    """
    return _Reader(file).tokenizer()


class _Reader:
    def __init__(self, file: GgufFile):
        self.file = file
        self.tokens = self._strings("tokens")
        types = self.get("token_type", [1] * len(self.tokens))
        if not isinstance(types, list) or len(types) != len(self.tokens):
            raise self.refuse("token_type", "a list", f"one entry for each of {len(self.tokens)} tokens is needed")
        self.types: list[int] = types

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def refuse(self, key: str, value: object, allowed: str) -> ModelError:
        return ModelError(f"{self.file.path}: tokenizer.ggml.{key} is {value!r}; {allowed}")

    def _strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise self.refuse(key, type(value).__name__, "a list of strings is needed")
        return value

    def tokenizer(self) -> ModelTokenizer:
        model = self.get("model")
        if model == "gpt2":
            backend, add_bos = self._byte_level(), self.get("pre") == "llama-bpe"
        elif model == "llama":
            backend, add_bos = self._sentence_piece(), True
        else:
            raise self.refuse("model", model, "those that run here are gpt2 and llama")
        self._add_special_tokens(backend)
        ids = {name: self.get(f"{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        special = {names[key]: self.tokens[i] for key, i in ids.items() if i is not None and i < len(self.tokens)}
        return ModelTokenizer(
            backend,
            ChatTemplate(self.file.metadata.get("tokenizer.chat_template"), special),
            bos_token_id=ids["bos"],
            eos_token_id=ids["eos"],
            add_bos=bool(self.get("add_bos_token", add_bos)),
            add_eos=bool(self.get("add_eos_token", False)),
        )

    def _vocabulary(self) -> dict[str, int]:
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        if len(vocabulary) != len(self.tokens):
            raise self.refuse("tokens", "a list with one token twice", "each token may stand there once")
        return vocabulary

    def _byte_level(self) -> Tokenizer:
        pre = self.get("pre", "default")
        if pre not in _PRE_TOKENIZERS:
            raise self.refuse("pre", pre, f"those that run here are {', '.join(_PRE_TOKENIZERS)}")
        merges = [tuple(merge.split(" ")) for merge in self._strings("merges")]
        # llama-bpe takes a word that is a token as it is, without looking at merges
        backend = self._bpe(merges, ignore_merges=pre == "llama-bpe")
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _words(pre)
        backend.decoder = decoders.ByteLevel()
        return backend

    def _bpe(self, merges: list[tuple[str, ...]], **options: Any) -> Tokenizer:
        try:
            return Tokenizer(BPE(self._vocabulary(), merges, **options))  # type: ignore[arg-type]
        except Exception as error:  # the library raises plain Exception
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{self.file.path}: tokenizer.ggml.merges do not fit the tokens: {error}") from None

    def _sentence_piece(self) -> Tokenizer:
        """SentencePiece's BPE joins the pair whose result has the best score: scores order the merges."""
        scores = self.get("scores")
        if not isinstance(scores, list) or len(scores) != len(self.tokens):
            raise self.refuse("scores", type(scores).__name__, "one number for each token is needed")
        vocabulary = self._vocabulary()
        merges = [
            (scores[i], piece[:cut], piece[cut:])
            for piece, i in vocabulary.items()
            if self.types[i] == 1
            for cut in range(1, len(piece))
            if piece[:cut] in vocabulary and piece[cut:] in vocabulary
        ]
        merges.sort(key=lambda merge: -merge[0])
        unknown = self.get("unknown_token_id", 0)
        backend = self._bpe(
            [merge[1:] for merge in merges], unk_token=self.tokens[unknown], byte_fallback=True, fuse_unk=True
        )
        prefix = self.get("add_space_prefix", True)
        spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
        strip: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _add_special_tokens(self, backend: Tokenizer) -> None:
        named = {self.get(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
        control = [
            token
            for i, token in enumerate(self.tokens)
            if self.types[i] == _CONTROL or i in named or (self.types[i] == _UNKNOWN and self.get("model") == "llama")
        ]
        user = [token for i, token in enumerate(self.tokens) if self.types[i] == _USER_DEFINED and i not in named]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])


def _words(pre: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words, inside which BPE merges."""
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    patterns = {"llama-bpe": (_LLAMA3,), "qwen2": (_QWEN2,), "default": _DEFAULT}[pre]
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
