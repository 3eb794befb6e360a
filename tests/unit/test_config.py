"""Values that make no sense are refused by name; those that do are taken as they are."""

import copy
import dataclasses
import math
import pickle

import pytest

from labkit import EngineConfig, SamplingParams
from labkit.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.2),
        ("top_k", -3),
        ("top_k", 2.5),
        ("min_p", 2),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("repetition_penalty", 0),
        ("presence_penalty", 5),
        ("frequency_penalty", -5),
        ("logprobs", -2),
        ("logprobs", 21),
        ("prompt_logprobs", True),
        ("seed", 2**64),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: "x"}),
        ("logit_bias", [3]),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("priority", 0.5),
        ("deadline_ms", 5),
        ("temperature", 10**400),
        ("logit_bias", {7.9: 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {"1_0": 1}),
        ("logit_bias", {" 10": 1}),
        ("stop", {"a": 1}),
        ("stop", b"ab"),
        ("stop", ["a\ud800"]),
        ("stop_token_ids", {3: 1}),
        ("foo", 1),
    ],
)
def test_sampling_params_refuse(field, value):
    with pytest.raises(RequestError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.param == field and isinstance(error.value, ValueError)


def test_sampling_params_normalise():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], logit_bias={"7": 2}, temperature=9.5, top_k=-1, seed=-1)
    assert params.stop == ("end",) and params.stop_token_ids == (3, 4) and params.logit_bias == {7: 2.0}
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(max_tokens=0, prompt_logprobs=1).max_tokens == 0
    assert SamplingParams(max_tokens=None).max_tokens is None


def test_an_unknown_field_is_answered_with_those_that_there_are():
    with pytest.raises(
        RequestError, match=r"SamplingParams has no field temprature.*n, max_tokens.*did you mean temper"
    ):
        SamplingParams(temprature=1)
    params = SamplingParams(stop=["a"])
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == dataclasses.replace(params) == params


def test_a_temperature_that_float32_cannot_divide_by_is_greedy():
    assert [SamplingParams(temperature=t).greedy for t in (0, 1e-40, 1e-38, 1e-6, 1e-4)] == [True] * 4 + [False]


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduler", "magic"),
        ("policy", "magic"),
        ("admission", "magic"),
        ("kernels", "magic"),
        ("dtype", "int4"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("block_size", 0),
        ("block_size", None),
        ("max_num_seqs", True),
        ("max_model_len", -1),
        ("num_kv_blocks", 1.5),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("enable_prefix_caching", "yes"),
        ("seed", "0"),
        ("quantization", "int3"),
        ("quantization", "int8"),
        ("kv_cache_dtype", "int8"),
        ("speculative", {"method": "ngram"}),
    ],
)
def test_engine_config_refuses(field, value):
    with pytest.raises(ValueError, match=field) as error:
        EngineConfig(**{field: value})
    known = {"policy": "fcfs, priority", "scheduler": "continuous, static, none"}
    assert known.get(field, "") in str(error.value)
