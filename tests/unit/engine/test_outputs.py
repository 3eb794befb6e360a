"""What deltas mean to a user: text, reasons, stop strings that correct the engine, logprobs."""

from labkit import SamplingParams
from labkit.engine.outputs import OutputProcessor
from labkit.engine.request import Delta, EngineRequest, TokenLogprobs
from tests.unit.engine.test_detokenizer import Bytes

PIECES = [b"a", b"b", b"c", b"\xc3", b"\xa9"]


def begin(**fields):
    processor = OutputProcessor(Bytes(PIECES))
    processor.add(EngineRequest("r", [1, 2], SamplingParams(**fields)), "ab")
    return processor


def test_tokens_become_text_and_the_last_delta_ends_it():
    processor = begin()
    assert processor.process([Delta("r", 0, [1])]).outputs[0].outputs[0].text == "a"
    done = processor.process([Delta("r", 0, [4], finish_reason="length")]).outputs[0]
    assert (done.outputs[0].text, done.outputs[0].token_ids, done.finished) == ("a\ufffd", [1, 4], True)
    assert done.prompt == "ab" and done.prompt_token_ids == [1, 2]
    assert processor.process([Delta("r", 0, [1])]).outputs == [], "it is closed"


def test_the_token_that_ends_is_counted_and_not_shown():
    for fields, reason, text in (
        ({}, None, "a"),
        ({"stop_token_ids": [2]}, 2, "a"),
        ({"stop_token_ids": [2], "include_stop_str_in_output": True}, 2, "ab"),
        ({"include_stop_str_in_output": True}, None, "a"),
    ):
        processor = begin(**fields)
        processor.process([Delta("r", 0, [1])])
        done = processor.process([Delta("r", 0, [2], finish_reason="stop", stop_reason=reason)]).outputs[0].outputs[0]
        assert (done.text, done.token_ids, done.stop_reason) == (text, [1, 2], reason)


def test_a_stop_string_ends_the_answer_and_tells_the_engine():
    processor = begin(stop="bc")
    assert processor.process([Delta("r", 0, [1, 2])]).outputs[0].outputs[0].text == "a"
    delta = Delta("r", 0, [3, 1, 1])
    done = processor.process([delta])
    answer = done.outputs[0].outputs[0]
    assert done.stops == [("r", 0, "bc")]
    assert (answer.text, answer.finish_reason, answer.stop_reason, answer.token_ids) == ("a", "stop", "bc", [1, 2, 3])
    assert (delta.token_ids, delta.finish_reason) == ([3], "stop"), "the metrics count what the user got"


def test_a_stop_string_with_the_last_allowed_token_is_a_stop():
    processor = begin(stop="b")
    done = processor.process([Delta("r", 0, [1, 2], finish_reason="length")])
    assert done.outputs[0].outputs[0].finish_reason == "stop" and done.stops == []


def test_choices_end_one_by_one():
    processor = begin(n=2)
    assert not processor.process([Delta("r", 1, [1], finish_reason="length")]).outputs[0].finished
    assert processor.process([Delta("r", 0, [2], finish_reason="length")]).outputs[0].finished


def test_logprobs_hold_the_chosen_token_and_the_best():
    processor = begin(logprobs=1, prompt_logprobs=0)
    entry = TokenLogprobs(1, -2.0, 3, [2], [-0.5])
    delta = Delta("r", 0, [1], logprobs=[entry], prompt_logprobs=[TokenLogprobs(2, -1.0, 1, [], [])])
    out = processor.process([delta]).outputs[0]
    assert out.outputs[0].logprobs == [{2: (-0.5, 1, "b"), 1: (-2.0, 3, "a")}]
    assert out.outputs[0].cumulative_logprob == -2.0
    assert out.prompt_logprobs == [None, {2: (-1.0, 1, "b")}]


def test_a_failed_step_names_its_reason_and_discarded_requests_are_silent():
    processor = begin()
    done = processor.process([Delta("r", 0, finish_reason="abort", error="boom"), Delta("x", 0, [1])])
    assert done.errors == {"r": "boom"} and done.outputs[0].finished
    processor = begin()
    processor.discard("r")
    assert processor.process([Delta("r", 0, [1])]).outputs == []


def test_times_and_preemptions_are_those_of_all_answers():
    processor = begin(n=2)
    late = dict(arrival_time=1.0, first_scheduled_time=5.0, first_token_time=6.0, num_preemptions=2)
    early = dict(arrival_time=1.0, first_scheduled_time=2.0, first_token_time=3.0, num_preemptions=1)
    processor.process([Delta("r", 0, [1], **late)])
    done = processor.process([Delta("r", 1, [1], finish_reason="length", finished_time=7.0, **early)]).outputs[0]
    assert (done.metrics.first_scheduled_time, done.metrics.first_token_time) == (2.0, 3.0)
    assert done.metrics.finished_time is None, "the other one goes on"
    done = processor.process([Delta("r", 0, [1], finish_reason="length", finished_time=6.5, **late)]).outputs[0]
    assert (done.metrics.finished_time, done.metrics.num_preemptions) == (7.0, 3)


def test_one_that_cannot_be_put_in_words_fails_alone():
    processor = begin(n=2)
    processor.add(EngineRequest("good", [1], SamplingParams()))
    done = processor.process([Delta("r", 0, ["no token id"]), Delta("r", 1, [1]), Delta("good", 0, [1])])
    bad, good = done.outputs
    assert list(done.errors) == ["r"] and "TypeError" in done.errors["r"]
    assert bad.finished and [c.finish_reason for c in bad.outputs] == ["abort"] * 2
    assert good.outputs[0].text == "a" and not good.finished
    assert processor.process([Delta("r", 1, [1])]).outputs == []
