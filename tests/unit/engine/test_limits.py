"""Refusals before anything runs, each with the field and what fits."""

import pytest

from labkit import SamplingParams
from labkit.engine.limits import RequestLimits
from labkit.errors import RequestError

LIMITS = RequestLimits(max_model_len=256, vocab_size=100, kv_tokens=64)


@pytest.mark.parametrize(
    ("ids", "fields", "param", "code"),
    [
        ([], {}, "prompt", "invalid_value"),
        ([1, 100], {}, "prompt", "invalid_value"),
        ([-1], {}, "prompt", "invalid_value"),
        ([1, True], {}, "prompt", "invalid_value"),
        ([1, 2.0], {}, "prompt", "invalid_value"),
        ([1], {"logit_bias": {100: 1}}, "logit_bias", "invalid_value"),
        ([1], {"stop_token_ids": [100]}, "stop_token_ids", "invalid_value"),
        ([1] * 256, {}, "prompt", "context_length_exceeded"),
        ([1] * 100, {"max_tokens": None}, "prompt", "context_length_exceeded"),
        ([1] * 20, {"max_tokens": 200}, "max_tokens", "context_length_exceeded"),
        ([1] * 20, {"max_tokens": 46}, "max_tokens", "context_length_exceeded"),
    ],
)
def test_refused(ids, fields, param, code):
    with pytest.raises(RequestError) as error:
        LIMITS.check(ids, SamplingParams(**fields))
    assert (error.value.param, error.value.code) == (param, code)
    assert param in str(error.value)


def test_what_just_fits():
    LIMITS.check([0, 99] * 10, SamplingParams(max_tokens=45))  # the last token needs no place in the pool
    LIMITS.check([1] * 64, SamplingParams(max_tokens=1))
    RequestLimits(256, 100, 10_000).check([1] * 255, SamplingParams(max_tokens=1))
    assert LIMITS.max_output_tokens(40) == 25


def test_a_length_that_the_pool_has_cut_names_the_pool():
    cut = RequestLimits(max_model_len=3, vocab_size=100, kv_tokens=3)
    with pytest.raises(RequestError, match=r"4 tokens .*KV pool holds 3 tokens.*shorten the prompt, or enlarge num_kv"):
        cut.check([1] * 4, SamplingParams())
    with pytest.raises(
        RequestError, match=r"has 1 token and .*at most 2 can be asked for here, or enlarge num_kv_blocks"
    ):
        cut.check([1], SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match=r"model's length is 256 tokens.*; shorten the prompt$"):
        RequestLimits(256, 100, 10_000).check([1] * 256, SamplingParams())
