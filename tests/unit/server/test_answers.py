"""Answers, whole and streamed."""

import json
import threading

import pytest

from labkit.models.tokenizer import Tokenizer
from labkit.server import completions
from tests.unit.server.fake_engine import EOS, LETTERS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def events(reply):
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
    data = [block.removeprefix("data: ") for block in reply.text.split("\n\n")[:-1]]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def answer(prompt_tokens, count):
    """What the fake engine writes."""
    return "".join(LETTERS[(prompt_tokens + i) % 26] for i in range(count))


def test_completion(server):
    body = server.complete(max_tokens=4).json()
    assert body["object"] == "text_completion" and body["model"] == "fake" and body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": answer(5, 4), "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


def test_chat(server):
    body = server.chat(max_tokens=3).json()
    prompt = len("user:hi\n>")
    assert body["object"] == "chat.completion" and body["usage"]["prompt_tokens"] == prompt
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": answer(prompt, 3)}
    assert choice["finish_reason"] == "length"


def test_a_chat_without_max_tokens_runs_to_the_models_length(server):
    assert server.chat().json()["usage"]["total_tokens"] == 64


def test_the_default_of_a_completion_gives_way_where_less_fits(server):
    assert server.complete().json()["usage"]["completion_tokens"] == 16
    assert server.complete(prompt="x" * 60).json()["usage"]["completion_tokens"] == 4


def test_chat_stream(server):
    chunks = events(server.chat(max_tokens=3, n=2, stream=True, stream_options={"include_usage": True}))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6
    for index in (0, 1):
        mine = [x for c in chunks for x in c["choices"] if x["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(x["delta"].get("content", "") for x in mine) == answer(9, 3)
        assert [x["finish_reason"] for x in mine if x["finish_reason"]] == ["length"]
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] == "length"


def test_a_stream_counts_in_every_chunk_if_asked(server):
    server.core.seconds = 0.02  # a chunk a step, except where the server was kept from reading
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = events(server.complete(max_tokens=3, stream=True, stream_options=options))
    letters = 0  # of which each is a token
    for chunk in chunks:
        letters += sum(len(choice["text"]) for choice in chunk["choices"])
        assert chunk["usage"] == {"prompt_tokens": 5, "completion_tokens": letters, "total_tokens": 5 + letters}
    assert letters == 3
    assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("options", [{}, {"continuous_usage_stats": True}])
def test_a_stream_that_is_not_asked_for_usage_has_none(server, options):
    chunks = events(server.complete(max_tokens=3, stream=True, stream_options=options))
    assert chunks and all("usage" not in chunk for chunk in chunks)


def test_completion_stream_of_several_prompts(server):
    chunks = events(server.complete(prompt=["a", "bc"], n=2, max_tokens=3, stream=True))
    texts = ["", "", "", ""]
    for chunk in chunks:
        assert "usage" not in chunk
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [answer(1, 3), answer(1, 3), answer(2, 3), answer(2, 3)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens(server, stream):
    """The prompt has 5 tokens, so the answer is fghijkl…"""
    reply = server.complete(max_tokens=20, stop=["zz", "ijk"], stream=stream, logprobs=0)
    choices = [c for chunk in events(reply) for c in chunk["choices"]] if stream else reply.json()["choices"]
    assert "".join(c["text"] for c in choices) == "fgh"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "ijk")
    assert [t for c in choices for t in (c["logprobs"] or {}).get("tokens", [])] == list("fghijk")
    server.complete(max_tokens=1)
    assert server.core.stops == [("r1", 0, "ijk")]
    metrics = server.http.get("/metrics").text
    assert 'labkit_requests_total{finish_reason="stop"} 1.0' in metrics
    assert 'labkit_requests_total{finish_reason="length"} 1.0' in metrics, "and not counted again as length"


def test_the_end_of_a_stop_string_may_never_come(server):
    chunks = events(server.complete(max_tokens=3, stop=["hX"], stream=True))
    texts = [c["text"] for chunk in chunks for c in chunk["choices"]]
    assert "".join(texts) == "fgh" and texts[-1] == ""


def test_characters_stay_whole(server):
    tokenizer = server.core.tokenizer
    server.core.script = tokenizer.encode("ď漢😀a")
    text = [c["text"] for chunk in events(server.complete(max_tokens=10, stream=True)) for c in chunk["choices"]]
    assert text == ["ď", "漢", "😀", "a", ""]
    assert server.complete(max_tokens=10).json()["choices"][0]["text"] == "ď漢😀a"


def test_half_a_character_at_the_end_is_the_same_streamed_or_not(server):
    server.core.script = server.core.tokenizer.encode("😀")
    whole = server.complete(max_tokens=2).json()["choices"][0]["text"]
    chunks = events(server.complete(max_tokens=2, stream=True))
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole == "\ufffd"


def test_echo(server):
    assert server.complete(echo=True, max_tokens=3).json()["choices"][0]["text"] == "hello" + answer(5, 3)
    ids = server.core.tokenizer.encode("hello")
    assert server.complete(prompt=ids, echo=True, max_tokens=3).json()["choices"][0]["text"] == "hello" + answer(5, 3)


def test_scoring_a_prompt(server):
    for stream in (False, True):
        reply = server.complete(prompt=["Yes é", "No"], echo=True, logprobs=1, max_tokens=0, stream=stream)
        choices = [c for chunk in events(reply) for c in chunk["choices"]] if stream else reply.json()["choices"]
        first = next(c for c in choices if c["index"] == 0)
        assert first["text"] == "Yes é"
        assert first["logprobs"]["tokens"] == ["Y", "e", "s", " ", "\ufffd", "\ufffd"]
        assert first["logprobs"]["token_logprobs"] == [None] + [-0.5] * 5
        assert first["logprobs"]["top_logprobs"][:2] == [None, {"e": -0.5}]
        assert first["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 4]
        assert {c["finish_reason"] for c in choices} - {None} == {"length"}
    assert (
        reply.status_code == 200 and server.complete(echo=True, max_tokens=0).json()["usage"]["completion_tokens"] == 0
    )


def test_completion_logprobs_of_a_stream_join_to_those_of_the_whole(server):
    fields = {"echo": True, "logprobs": 2, "max_tokens": 3}
    whole = server.complete(**fields).json()["choices"][0]["logprobs"]
    parts = [c["logprobs"] for chunk in events(server.complete(**fields, stream=True)) for c in chunk["choices"]]
    assert {name: [x for part in parts if part for x in part[name]] for name in whole} == whole
    assert whole["text_offset"] == list(range(8)) and len(whole["tokens"]) == 8


def test_chat_logprobs(server):
    server.core.script = server.core.tokenizer.encode("é")
    entries = server.chat(max_tokens=2, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in entries] == [[0xC3], [0xA9]]
    assert [e["logprob"] for e in entries] == [-0.5, -0.5]
    assert [len(e["top_logprobs"]) for e in entries] == [2, 2]
    assert entries[0]["top_logprobs"][0] == {name: entries[0][name] for name in ("token", "logprob", "bytes")}
    assert server.chat(max_tokens=2, logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_prompt_ids_are_taken_as_they_are(server):
    server.complete(prompt=[[5, 6], [EOS]], max_tokens=1)
    assert [r.prompt_token_ids for r in server.core.requests] == [[5, 6], [EOS]]


def test_more_top_k_than_the_engine_can_hold(server):
    assert server.complete(top_k=10**30, max_tokens=1).status_code == 200
    assert server.core.requests[-1].params.top_k == 0


@pytest.mark.parametrize(
    "path,fields,code,param",
    [
        (TEXT, {"prompt": "x" * 64}, "context_length_exceeded", "prompt"),
        (TEXT, {"prompt": "x", "max_tokens": 64}, "context_length_exceeded", "max_tokens"),
        (CHAT, {"max_completion_tokens": 64}, "context_length_exceeded", "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 99}]}, "context_length_exceeded", "messages"),
        (TEXT, {"prompt": [5, 257]}, "invalid_value", "prompt"),
        (TEXT, {"prompt": ""}, "invalid_value", "prompt"),
        (TEXT, {"logit_bias": {"257": 1}}, "invalid_value", "logit_bias"),
        (TEXT, {"stop_token_ids": [999]}, "invalid_value", "stop_token_ids"),
        (TEXT, {"stream": True, "max_tokens": 64}, "context_length_exceeded", "max_tokens"),
    ],
    ids=str,
)
def test_what_can_never_run(server, path, fields, code, param):
    reply = (server.chat if path == CHAT else server.complete)(**fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, code, param)
    assert server.core.requests == []


def test_a_prompt_that_is_hopeless_is_not_even_tokenised(server, monkeypatch):
    """The longest token has 5 bytes and the model's length is 64 tokens."""
    seen = []
    encode = Tokenizer.encode

    def watched(self, text, *args, **fields):
        seen.append(len(text))
        return encode(self, text, *args, **fields)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    for length in (4 * 5 * 64 + 1, 4 * 5 * 64):
        for reply in (
            server.complete(prompt="x" * length),
            server.chat(messages=[{"role": "user", "content": "x" * length}]),
        ):
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(seen) == 2 and min(seen) == 4 * 5 * 64


@pytest.mark.parametrize(("logprobs", "apart"), [(None, False), (0, True), (3, True)])
def test_logprobs_are_put_together_apart_from_the_loop(server, monkeypatch, logprobs, apart):
    threads = []
    count = completions.usage
    monkeypatch.setattr(completions, "usage", lambda out: threads.append(threading.current_thread().name) or count(out))
    assert server.complete(max_tokens=2, logprobs=logprobs).status_code == 200
    assert [name != "labkit-server" for name in threads] == [apart]
