"""What a request may look like, and how a wrong one is told so."""

import json

import pytest

from labkit.server import protocol
from labkit.server.errors import ApiError
from labkit.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    engine_params,
    parse,
)

USER = [{"role": "user", "content": "hi"}]


def read(kind, **fields):
    base = {"messages": USER} if kind is ChatRequest else {"prompt": "hi"}
    return parse(json.dumps({**base, **fields}).encode(), kind)


def refused(kind, **fields):
    with pytest.raises(ApiError) as error:
        engine_params(read(kind, **fields))
    assert error.value.status == 400 and error.value.message
    return error.value.code, error.value.param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xe9"}',
        b"{} x",
        b"[" * 50_000,
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "\\ud912"}',
        b'{"prompt": "\\udc00"}',
        b'{"prompt": "\\ud912\\u0041"}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_not_json(body):
    with pytest.raises(ApiError) as error:
        parse(body, CompletionRequest)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"3", b"null"])
def test_no_object(body):
    with pytest.raises(ApiError) as error:
        parse(body, CompletionRequest)
    assert error.value.code == "invalid_value"


@pytest.mark.parametrize(
    "field,values",
    {
        "temperature": ["1", True, -0.1, 2.1, [1]],
        "top_p": [0, 1.1, "0.5"],
        "top_k": [-2, 1.5, "4"],
        "min_p": [-0.1, 1.1],
        "n": [0, 129, "1", True, 1.5],
        "max_tokens": [-1, "4", 0.5, True],
        "min_tokens": [-1, 17, 10**30],
        "seed": ["x", 2**64, -(2**63) - 1, 1.5],
        "stop": [5, [1], [""], "", ["a", None], "x" * 4097, ["a", "x" * 4097]],
        "stop_token_ids": ["a", ["a"], [-1], 4],
        "logit_bias": [{"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, [7], {"1": True}],
        "presence_penalty": [2.5, "low"],
        "frequency_penalty": [-2.5],
        "repetition_penalty": [0, -1],
        "stream": [1, "true"],
        "ignore_eos": ["no", 0],
        "priority": ["urgent", 2**31],
        "user": [17],
        "model": [7],
        "metadata": ["x", {"a": 1}],
    }.items(),
    ids=str,
)
def test_wrong_values_name_their_field(field, values):
    for value in values:
        code, param = refused(CompletionRequest, **{field: value})
        assert code == "invalid_value" and param.split(".")[0].split("[")[0] == field, value


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]}, "messages[0].content"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
    ids=str,
)
def test_wrong_chats(fields, param):
    assert refused(ChatRequest, **fields) == ("invalid_value", param)


@pytest.mark.parametrize(
    "prompt", [None, 3, {}, [], [[]], ["a", 1], [1, "a"], [1.5], [True], [["a"]], [[1], 2]], ids=str
)
def test_wrong_prompts(prompt):
    assert refused(CompletionRequest, prompt=prompt) == ("invalid_value", "prompt")


@pytest.mark.parametrize(
    "prompt,read_as",
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
    ids=str,
)
def test_prompts(prompt, read_as):
    assert read(CompletionRequest, prompt=prompt).prompt == read_as


def test_unknown_fields():
    assert refused(ChatRequest, colour="red") == ("unknown_parameter", "colour")
    assert refused(CompletionRequest, messages=USER) == ("unknown_parameter", "messages")
    assert refused(ChatRequest, messages=[{**USER[0], "colour": 1}]) == ("unknown_parameter", "messages[0].colour")
    for kind, fields in ((TokenizeRequest, {"prompt": "x"}), (DetokenizeRequest, {"tokens": [1]})):
        with pytest.raises(ApiError) as error:
            parse(json.dumps({**fields, "colour": 1}).encode(), kind)
        assert error.value.code == "unknown_parameter"


@pytest.mark.parametrize(
    "kind,field,value",
    [
        (ChatRequest, "tools", []),
        (ChatRequest, "tool_choice", "none"),
        (ChatRequest, "functions", []),
        (ChatRequest, "response_format", {"type": "json_object"}),
        (ChatRequest, "modalities", ["audio"]),
        (ChatRequest, "store", True),
        (ChatRequest, "store", 0),
        (ChatRequest, "service_tier", "flex"),
        (CompletionRequest, "suffix", "x"),
        (CompletionRequest, "best_of", 1),
    ],
)
def test_fields_of_openai_that_are_not_supported(kind, field, value):
    assert refused(kind, **{field: value}) == ("unsupported_parameter", field)


def test_tool_calls_in_a_message_are_not_supported():
    messages = [{"role": "assistant", "content": "x", "tool_calls": [{}]}]
    assert refused(ChatRequest, messages=messages) == ("unsupported_parameter", "messages[0].tool_calls")


def test_an_answer_that_is_sent_back_may_hold_what_servers_leave_empty():
    echo = {"role": "assistant", "content": "x", "tool_calls": [], "annotations": [], "refusal": None, "audio": None}
    assert read(ChatRequest, messages=[echo]).messages[0].for_template() == {"role": "assistant", "content": "x"}
    assert refused(ChatRequest, messages=[{**echo, "annotations": [1]}])[0] == "unknown_parameter"
    assert read(ChatRequest, service_tier="default").n == 1


def test_fields_without_effect_and_nulls():
    nothing = {"store": False, "service_tier": "auto", "response_format": {"type": "text"}, "user": "u"}
    nulls = dict.fromkeys(("tools", "stop", "seed", "logit_bias", "stream", "top_p", "temperature", "n"))
    params = engine_params(read(ChatRequest, metadata={"k": "v"}, **nothing, **nulls))
    assert params == engine_params(read(ChatRequest))


def test_messages_are_read_for_the_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "tool", "content": parts, "tool_call_id": "c", "refusal": None, "tool_calls": None}]
    turn = read(ChatRequest, messages=messages).messages[0].for_template()
    assert turn == {"role": "tool", "content": "a\nb", "tool_call_id": "c"}


def test_the_engine_gets_what_was_asked_for():
    fields = {"temperature": 1, "top_p": 0.5, "top_k": 7, "n": 3, "seed": 5, "stop": "x", "stop_token_ids": [4]}
    params = engine_params(read(CompletionRequest, **fields, logit_bias={"7": 1}, min_p=0.1, priority=-3))
    assert (params.temperature, params.top_p, params.top_k, params.n, params.seed) == (1, 0.5, 7, 3, 5)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (4,), {7: 1.0})
    assert (params.min_p, params.priority) == (0.1, -3)


def test_lengths():
    assert engine_params(read(CompletionRequest)).max_tokens == 16
    assert engine_params(read(ChatRequest)).max_tokens is None
    assert engine_params(read(ChatRequest, max_tokens=3)).max_tokens == 3
    assert engine_params(read(ChatRequest, max_tokens=3, max_completion_tokens=4)).max_tokens == 4
    assert refused(CompletionRequest, max_tokens=0) == ("invalid_value", "max_tokens")
    assert refused(ChatRequest, max_completion_tokens=2, min_tokens=3) == ("invalid_value", "min_tokens")


def test_logprobs_of_completions_and_chats():
    assert engine_params(read(ChatRequest, logprobs=True)).logprobs == 0
    assert engine_params(read(ChatRequest, logprobs=True, top_logprobs=4)).logprobs == 4
    assert engine_params(read(ChatRequest, logprobs=False)).logprobs is None
    assert engine_params(read(CompletionRequest, logprobs=2)).prompt_logprobs is None
    assert engine_params(read(CompletionRequest, logprobs=2, echo=True)).prompt_logprobs == 2
    assert engine_params(read(CompletionRequest, echo=True, max_tokens=0)).prompt_logprobs == 0
    assert engine_params(read(CompletionRequest, echo=True)).prompt_logprobs is None


@pytest.mark.parametrize(
    "messages,text",
    [
        (["hi"], "messages[0]: it must be an object, not 'hi'"),
        ([[]], "messages[0]: it must be an object"),
        ([], "messages: list should have at least 1 item"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            'content must be a string or a list of {"type": "text", "text": "…"}',
        ),
        ([{"role": "user", "content": 5}], "messages[0].content: input should be a valid string, not 5"),
    ],
)
def test_what_is_said_of_wrong_messages_are_words_of_json(messages, text):
    with pytest.raises(ApiError) as error:
        read(ChatRequest, messages=messages)
    assert error.value.message == text


MANY = 30_000


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"stop": [5] * MANY}, "stop"),
        ({"stop_token_ids": ["x"] * MANY}, "stop_token_ids[0]"),
        ({"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}, "logit_bias.0"),
        ({"metadata": dict.fromkeys(map(str, range(MANY)), 1)}, "metadata.0"),
        ({"messages": [1] * MANY}, "messages[0]"),
        ({"messages": [{}] * MANY}, "messages[0].role"),
        (dict.fromkeys(map("f{}".format, range(MANY)), 1), "f0"),
        ({"messages": [{**USER[0], **dict.fromkeys(map("f{}".format, range(MANY)), 1)}]}, "messages[0].f0"),
        ({"stream": True, "stream_options": dict.fromkeys(map("f{}".format, range(MANY)), 1)}, "stream_options.f0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_of_a_million_mistakes_the_first_is_told(fields, param, monkeypatch):
    described = []
    explain = protocol._explain
    monkeypatch.setattr(protocol, "_explain", lambda error: described.append(error.error_count()) or explain(error))
    code, found = refused(ChatRequest, **{"messages": USER, **fields})
    assert described[0] < 5  # each of them described, they would take many seconds and gigabytes
    assert found.partition(".")[0].partition("[")[0] == param.partition(".")[0].partition("[")[0]
    assert code in ("invalid_value", "unknown_parameter")
