"""Tokenizers: the ids of transformers, exactly one BOS, exact round trips, bytes of single tokens."""

from __future__ import annotations

import json
import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from labkit.errors import ModelError, RequestError
from labkit.models.checkpoint import open_checkpoint
from labkit.models.gguf import GgufFile
from labkit.models.gguf_tokenizer import load_gguf_tokenizer
from labkit.models.tokenizer import load_tokenizer
from tests.checkpoints import (
    SPECIALS,
    byte_tokenizer,
    config_json,
    edit_json,
    random_weights,
    word_tokenizer,
    write_gguf,
    write_tokenizer,
)

TEXTS = [
    "",
    " ",
    "the quick brown fox",
    "  two spaces,  and three   ",
    "line\r\nbreaks\n\n\ttabs",
    "don't we'll I'm THEY'RE",
    "2024 and 1234567 and ½ ²",
    "über naïve 漢字 😀 👨‍👩‍👧 ď",
    "<s>special</s> <|im_start|>user<|im_end|>",
    "x ,  y . z ! a 'quote' ( b )",
    "\x00\x7f\u200b\ufeff\ue000",
]


def spm_tokenizer(fallback: bool = True) -> Tokenizer:
    """A small vocabulary in Llama 2's way: ▁ for spaces, bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "▁",
        *"theqickbrownfxjumpsvlazydg",
        "th",
        "the",
        "▁the",
        "qu",
        "ick",
        "ic",
        "▁q",
        "▁qu",
        "▁quick",
        "he",
        "eq",
        "uic",
        "ox",
    ]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("q", "u"), ("i", "c"), ("ic", "k"), ("▁", "qu"), ("▁qu", "ick")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=fallback, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS[:3]])
    return tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def folder(tmp_path: Path, tokenizer: Tokenizer, **fields: Any) -> Path:
    write_tokenizer(tmp_path, tokenizer, **fields)
    return tmp_path


NO_SAY = {"add_bos_token": ..., "add_eos_token": ...}


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (byte_tokenizer, {}),
        (byte_tokenizer, NO_SAY),
        (byte_tokenizer, {"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}}),
        (lambda: with_bos(byte_tokenizer()), NO_SAY),
        (lambda: with_bos(byte_tokenizer()), {"add_bos_token": False, "add_eos_token": ...}),
        (lambda: with_bos(byte_tokenizer()), {"add_bos_token": True}),
        (spm_tokenizer, {}),
        (lambda: with_bos(spm_tokenizer()), NO_SAY),
    ],
)
def test_same_ids_and_text_as_transformers(make: Any, fields: dict[str, Any], add: bool, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder(tmp_path, make(), **fields)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in TEXTS:
        want = theirs.encode(text, add_special_tokens=add)
        if add and want[:2] == [1, 1]:
            want = want[1:]  # here a BOS in the text is the BOS
        assert ours.encode(text, add) == want, text
        for skip in (True, False):
            decoded = theirs.decode(want, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(want, skip) == decoded
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.vocab_size == len(theirs)
    assert [i for i in range(len(theirs)) if ours.is_special(i)] == sorted(
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    )


def test_exactly_one_bos(tmp_path: Path) -> None:
    for number, (make, fields) in enumerate(
        [(byte_tokenizer, {"add_bos_token": True}), (lambda: with_bos(byte_tokenizer()), NO_SAY)]
    ):
        (tmp_path / str(number)).mkdir()
        tokenizer = load_tokenizer(folder(tmp_path / str(number), make(), **fields))
        for text in ("hello", "<s>hello", ""):
            ids = tokenizer.encode(text)
            assert ids[0] == 1 and ids.count(1) == 1
        assert 1 not in tokenizer.encode("hello", add_special_tokens=False)


def test_every_text_goes_there_and_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, byte_tokenizer()))
    rng = random.Random(3)
    texts = [text for text in TEXTS if "<s>" not in text]
    texts += [
        "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xD7FF)])) for _ in range(50)) for _ in range(50)
    ]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_bytes_of_a_part_of_a_character(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, byte_tokenizer()))
    ids = tokenizer.encode("漢")
    assert [len(tokenizer.token_bytes(i)) for i in ids] and b"".join(map(tokenizer.token_bytes, ids)) == "漢".encode()
    assert {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} >= {bytes([byte]) for byte in range(256)}
    assert tokenizer.token_bytes(2) == b"</s>"
    assert (
        tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**12) == b""
    )


def test_bytes_where_pieces_fall_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, spm_tokenizer()))
    ids = tokenizer.encode("the quick 漢")
    assert b"".join(map(tokenizer.token_bytes, ids)) == " the quick 漢".encode()
    assert b"\xe6" in [tokenizer.token_bytes(i) for i in ids]


def test_bytes_of_plain_words(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, word_tokenizer(20)))
    assert tokenizer.token_bytes(7) == b"w7" and tokenizer.decode([7, 8]) == "w7 w8"


def test_a_lone_surrogate_is_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, byte_tokenizer()))
    with pytest.raises(RequestError, match=r"U\+D83D\) at character 2") as caught:
        tokenizer.encode("ab\ud83dcd")
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "\udc00"}])
    assert caught.value.param == "messages"


def test_a_long_text_holds_up_no_other_thread() -> None:
    """The server reads prompts in a thread while its event loop goes on."""
    tokenizer = open_checkpoint("toy").tokenizer
    text = "word " * 200_000
    longest, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        while not ended.is_set():
            begin = time.perf_counter()
            time.sleep(0.001)
            longest = max(longest, time.perf_counter() - begin)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    ids = tokenizer.encode(text)
    seconds = time.perf_counter() - begin
    ended.set()
    watcher.join()
    assert tokenizer.decode(ids) == text
    assert longest < seconds / 2


def test_leftovers_of_training_are_switched_off(tmp_path: Path) -> None:
    backend = byte_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = load_tokenizer(folder(tmp_path, backend))
    assert len(tokenizer.encode("the quick brown fox jumps over and over")) > 8
    assert len(tokenizer.encode("the")) < 8


def test_tokens_that_only_the_config_lists(tmp_path: Path) -> None:
    size = byte_tokenizer().get_vocab_size()
    folder(tmp_path, byte_tokenizer())
    edit_json(
        tmp_path / "tokenizer_config.json",
        added_tokens_decoder={str(size): {"content": "<extra>", "special": True}},
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<extra>", False)[-1] == size and tokenizer.is_special(size)
    edit_json(
        tmp_path / "tokenizer_config.json",
        added_tokens_decoder={str(size + 3): {"content": "<extra>", "special": True}},
    )
    with pytest.raises(ModelError, match=r"tokenizer_config\.json.*<extra>"):
        load_tokenizer(tmp_path)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    folder(tmp_path, byte_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_without_a_tokenizer_config(tmp_path: Path) -> None:
    folder(tmp_path, byte_tokenizer())
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path, bos_token_id=1, eos_token_id=2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("hi")[0] != 1


# ----- GGUF


def gguf_tokenizer(path: Path, **metadata: Any) -> Any:
    config = config_json(num_hidden_layers=1)
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    write_gguf(path / "x.gguf", config, random_weights(config), metadata=keys)
    return load_gguf_tokenizer(GgufFile(path / "x.gguf"))


def words_of(pre: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that the tokenizer.json of such models has, from their files on the hub."""
    letters, tail = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return plain
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}[pre]
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(f"{contractions}|{letters}|{digits}|{tail}"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_gguf_vocabulary_is_the_folders(pre: str, tmp_path: Path) -> None:
    backend = byte_tokenizer()
    backend.pre_tokenizer = words_of(pre)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    ours = gguf_tokenizer(tmp_path, pre=pre, add_bos_token=False)
    for text in [*TEXTS, "u\u0308ber e\u0301"]:
        assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text)) == backend.decode(backend.encode(text).ids)
    assert [i for i in range(330) if ours.is_special(i)] == [0, 1, 2, 3, 4]


def test_smollm_digits_are_tokens_of_their_own(tmp_path: Path) -> None:
    assert len(gguf_tokenizer(tmp_path, pre="smollm").encode("2024")) == 4


def test_default_pre_tokenizer_cuts_punctuation_and_triples_of_digits(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre="default")
    assert tokenizer.decode(tokenizer.encode("a, b… 12345!")) == "a, b… 12345!"
    assert tokenizer.encode("a") + tokenizer.encode(",") == tokenizer.encode("a,")


@pytest.mark.parametrize(("given", "starts"), [(True, True), (False, False), (None, False)])
def test_gguf_bos_as_the_file_says(given: bool | None, starts: bool, tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, add_bos_token=given)
    assert (tokenizer.encode("hi")[0] == 1) == starts
    assert tokenizer.encode("<s>hi").count(1) == 1
    assert 1 not in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_gguf_llama3_begins_with_bos_unless_told_otherwise(tmp_path: Path) -> None:
    assert gguf_tokenizer(tmp_path, pre="llama-bpe", add_bos_token=None).encode("hi")[0] == 1


def test_gguf_user_defined_tokens_are_whole_but_not_special(tmp_path: Path) -> None:
    types = [3] * 5 + [1] * 315 + [4] + [5] * 26
    tokenizer = gguf_tokenizer(tmp_path, token_type=types)
    assert 320 in tokenizer.encode("a [PAD320] b") and not tokenizer.is_special(320)
    assert tokenizer.decode([320]) == "[PAD320]"


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE in its plainest form: join the neighbours with the best score, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(pieces))]
        known = [(score, i) for score, i in pairs if score is not None]
        if not known:
            break
        _, at = max(known)
        pieces[-at : -at + 2] = [pieces[-at] + pieces[-at + 1]]
    return [
        part
        for piece in pieces
        for part in ([piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]


@pytest.mark.parametrize("seed", range(3))
def test_gguf_sentencepiece(seed: int, tmp_path: Path) -> None:
    model = json.loads(spm_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    rng = random.Random(seed)
    scores = [0.0] * 259 + [-float(i) for i in rng.sample(range(len(tokens) - 259), len(tokens) - 259)]
    config = config_json(num_hidden_layers=1, vocab_size=len(tokens))
    keys = {"model": "llama", "pre": None, "merges": None, "tokens": tokens, "token_type": types, "scores": scores}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    metadata |= {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.unknown_token_id": 0}
    write_gguf(tmp_path / "x.gguf", config, random_weights(config), metadata=metadata)
    ours = open_checkpoint(str(tmp_path / "x.gguf")).tokenizer
    by_piece = dict(zip(tokens[259:], scores[259:]))
    for text in ["the quick brown fox jumps over the lazy dog", "the", "quickthe qu", "漢 the😀", "a  b", "thethethe"]:
        assert [tokens[i] for i in ours.encode(text, False)] == sentencepiece(text, by_piece), text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("the")[0] == 1
    assert ours.token_bytes(tokens.index("▁the")) == b" the" and ours.token_bytes(3 + 0xE6) == b"\xe6"
