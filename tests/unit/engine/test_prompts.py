"""What can be given to generate and chat, and what is said of anything else."""

import numpy as np
import pytest
import torch

from labkit import SamplingParams
from labkit.engine.prompts import as_conversations, as_params, as_prompts, text_and_ids
from labkit.errors import RequestError
from tests.unit.engine.test_detokenizer import Bytes

TALK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompts", "want"),
    [
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([], []),
    ],
)
def test_one_prompt_or_a_list(prompts, want):
    assert as_prompts(prompts) == want


@pytest.mark.parametrize("prompts", [5, None, 1.5, b"ab"])
def test_no_prompts(prompts):
    with pytest.raises(RequestError, match=r"prompts is .*text, token ids or a dict.*or a list"):
        as_prompts(prompts)


def test_ids_and_text():
    class Tokenizer(Bytes):
        def encode(self, text):
            return [7] * len(text)

    tokenizer = Tokenizer([b"a"])
    assert text_and_ids("ab", tokenizer) == ("ab", [7, 7])
    assert text_and_ids({"prompt": "ab", "prompt_token_ids": (1,)}, tokenizer) == ("ab", [1])
    for ids in ([np.int64(1), 2], np.array([1, 2]), {"prompt_token_ids": torch.tensor([1, 2])}):
        text, taken = text_and_ids(ids, tokenizer)
        assert (text, taken) == (None, [1, 2]) and all(type(token) is int for token in taken)
    for wrong, says in (
        ({"prompt_token_ids": "hello"}, "prompt_token_ids is 'hello'; .* list of token ids"),
        ({"prompt_token_ids": 5}, "prompt_token_ids is 5"),
        ({"prompt": [1]}, r"prompt is \[1\]; .* text"),
        ({"prompt": None}, "neither"),
        ({"text": "a"}, "has the key 'text'"),
        (5, "text, token ids or a dict, not int"),
    ):
        with pytest.raises(RequestError, match=says):
            text_and_ids(wrong, tokenizer)


def test_sampling_params_for_all_or_each():
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert as_params(None, 2) == [SamplingParams()] * 2
    assert as_params(one, 2) == [one, one] and as_params((one, two), 2) == [one, two]
    for wrong, says in (
        (5, "sampling_params is 5; .*a SamplingParams, or a list"),
        ({"max_tokens": 5}, r"sampling_params is a dict; .*SamplingParams\(\*\*"),
        ([one, 5], "sampling_params holds 5"),
        ([one], "2 prompts and 1 sampling_params"),
    ):
        with pytest.raises(RequestError, match=says):
            as_params(wrong, 2)


def test_one_talk_or_several():
    assert as_conversations(TALK) == [TALK] and as_conversations([TALK, TALK]) == [TALK, TALK]
    for wrong in ("hi", 5, TALK[0], ["hi"], [TALK, "hi"], [[5]], [TALK[0], 5]):
        with pytest.raises(RequestError, match=r"messages.*list of .*role") as error:
            as_conversations(wrong)
        assert error.value.param == "messages"
    for message in (
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": 1, "content": "hi"},
        {"content": "hi"},
    ):
        with pytest.raises(RequestError, match=r"messages\[1\]\.(role|content) is"):
            as_conversations([*TALK, message])
    with pytest.raises(RequestError, match="no messages"):
        as_conversations([[]])
