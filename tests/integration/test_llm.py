"""`LLM` as a user meets it: forms of prompts, order, streams, failures, Ctrl-C, closing."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from typing import Any

import pytest

from labkit import LLM, SamplingParams
from labkit.engine.trace import Trace
from labkit.errors import EngineClosedError, EngineStepError, RequestError
from tests import checkpoints
from tests.integration.conftest import assert_idle, engine, run, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with engine(checkpoint("llama")) as llm:
        yield llm


def test_forms_of_prompts(llm):
    ids = llm.tokenizer.encode("the lazy dog")
    forms = ["the lazy dog", ["the lazy dog"], ids, [ids], {"prompt": "the lazy dog"}, {"prompt_token_ids": ids}]
    outs = [run(llm, form, GREEDY) for form in forms]
    assert all(len(out) == 1 and out[0].prompt_token_ids == ids for out in outs)
    assert len({tuple(out[0].outputs[0].token_ids) for out in outs}) == 1
    assert run(llm, [], GREEDY) == []


def test_answers_keep_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    outs = run(llm, ["a", [7, 8], "b"], params)
    assert [len(out.outputs[0].token_ids) for out in outs] == [9, 1, 5]
    assert [out.prompt for out in outs] == ["a", None, "b"]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("", GREEDY),
        ([5, 10**6], GREEDY),
        ([5, "x"], GREEDY),
        ({"text": "x"}, GREEDY),
        (5, GREEDY),
        ({"prompt_token_ids": None}, GREEDY),
        (["a"], [None]),
        ("\ud800", GREEDY),
        (["a", "b"], [GREEDY]),
        ([5] * 600, GREEDY),
        ([5] * 500, SamplingParams(max_tokens=100)),
        ("a", SamplingParams(logit_bias={347: 1.0})),
    ],
    ids=str,
)
def test_what_cannot_run_raises_before_anything_does(llm, prompt, params):
    before = llm.engine.stats().tokens_in
    with pytest.raises((ValueError, TypeError)):
        run(llm, ["fine", prompt] if not isinstance(params, list) else prompt, params)
    assert llm.engine.stats().tokens_in == before
    assert_idle(llm)


def test_unknown_fields_are_named(checkpoint):
    with pytest.raises(ValueError, match=r"max_seqs.*max_num_seqs"):
        LLM(str(checkpoint("llama")), max_seqs=3)


def test_choices_share_the_prompts_blocks(checkpoint):
    prompt = list(range(10, 58))  # three blocks, of which two can be shared
    params = SamplingParams(n=4, seed=1, max_tokens=4, ignore_eos=True)
    with engine(checkpoint("llama"), enable_prefix_caching=False) as llm:
        first = next(out for out in llm.stream(prompt, params) if all(c.token_ids for c in out.outputs))
        rows = [c.token_ids for c in first.outputs]
        assert all(rows)
        assert_idle(llm)  # the stream was dropped
        most = 0
        for out in llm.stream(prompt, params):  # noqa: B007 - the last one is looked at below
            most = max(most, llm.engine.stats().kv_blocks_in_use)
        assert most <= 2 + 4 * 2, "two shared blocks, and each choice's own"
        alone = run(llm, prompt, SamplingParams(seed=1, max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids
        again = run(llm, [prompt, prompt], params)
    answers = [c.token_ids for c in out.outputs]
    assert answers[0] == alone and len(set(map(tuple, answers))) == 4
    assert all([c.token_ids for c in o.outputs] == answers for o in again)


def test_identical_prompts_in_one_step(checkpoint):
    prompt = list(range(20, 60))
    with engine(checkpoint("llama"), enable_prefix_caching=False) as llm:
        want = [run(llm, [p], GREEDY)[0].outputs[0].token_ids for p in (prompt, prompt, [*prompt, 9, 8, 7, 6, 5])]
    with engine(checkpoint("llama")) as llm:
        for _ in "ab":
            assert tokens(run(llm, [prompt, prompt, [*prompt, 9, 8, 7, 6, 5]], GREEDY)) == want


def test_a_prompt_of_whole_blocks_three_times(checkpoint):
    prompt = list(range(100, 132))
    one = SamplingParams(temperature=0, max_tokens=1)
    with engine(checkpoint("llama")) as llm:
        outs = [run(llm, [prompt], params)[0] for params in (GREEDY, GREEDY, one)]
        assert [out.num_cached_tokens for out in outs] == [0, 16, 16]
        assert outs[0].outputs[0].token_ids == outs[1].outputs[0].token_ids
        assert outs[2].outputs[0].token_ids == outs[0].outputs[0].token_ids[:1]
        reader = llm.stream(prompt, GREEDY)
        next(reader)
        assert tokens(run(llm, [prompt], GREEDY)) == [outs[0].outputs[0].token_ids]
        *_, last = reader
        assert last.outputs[0].token_ids == outs[0].outputs[0].token_ids


def test_rows_forget_their_last_request(checkpoint):
    """Plain requests slip into slots that carried every parameter there is, and see none of it."""
    loud = [
        SamplingParams(
            max_tokens=3 + i,
            seed=i,
            top_k=1,
            logprobs=5,
            min_tokens=2,
            logit_bias={30: 50.0},
            stop_token_ids=[31],
            repetition_penalty=1.5,
            presence_penalty=1,
            frequency_penalty=1,
        )
        for i in range(4)
    ]
    plain = [[40 + i, 41, 42] for i in range(6)]
    with engine(checkpoint("llama"), max_num_seqs=4) as llm:
        want = [tokens(run(llm, [p], GREEDY))[0] for p in plain]
        outs = run(llm, [[7, 8, 9]] * 4 + plain, loud + [GREEDY] * 6)
        assert tokens(outs[4:]) == want
        assert all(out.outputs[0].logprobs is None for out in outs[4:])
        assert all(len(out.outputs[0].logprobs) == len(out.outputs[0].token_ids) for out in outs[:4])


def test_prompt_logprobs_read_no_cache(checkpoint):
    prompt = list(range(50, 83))
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    with engine(checkpoint("llama"), max_num_batched_tokens=16) as llm:
        run(llm, [prompt], GREEDY)
        first, second = (run(llm, [prompt], params)[0] for _ in "ab")
    assert len(first.prompt_logprobs) == 33 and first.prompt_logprobs[0] is None
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    for a, b in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:]):
        assert {t: pytest.approx(e.logprob, abs=1e-5) for t, e in a.items()} == {t: e.logprob for t, e in b.items()}


def test_prompt_logprobs_come_once_although_preempted(checkpoint):
    prompts = [list(range(20 + i, 60 + i)) for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=0, n=2)
    with engine(checkpoint("llama"), num_kv_blocks=8) as llm:
        outs = run(llm, prompts, params)
        assert llm.engine.stats().preempted > 0, "the pool is too large for this test"
    assert [len(out.prompt_logprobs) for out in outs] == [40] * 3
    assert all(len(c.token_ids) == 30 for out in outs for c in out.outputs)


def test_scoring_writes_nothing(llm):
    [out] = run(llm, [[5, 6, 7]], SamplingParams(max_tokens=0, prompt_logprobs=1))
    answer = out.outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason, len(out.prompt_logprobs)) == ("", [], "length", 3)


def test_without_max_tokens_an_answer_ends_with_the_pool(checkpoint):
    with engine(checkpoint("llama"), num_kv_blocks=4, max_model_len=256) as llm:
        neighbour = llm.stream(list(range(5, 15)), GREEDY)
        next(neighbour)
        for bad in (
            dict(prompt=[5] * 100, params=GREEDY),
            dict(prompt=[5] * 20, params=SamplingParams(max_tokens=200)),
        ):
            with pytest.raises(RequestError) as error:
                run(llm, [bad["prompt"]], bad["params"])
            assert error.value.code == "context_length_exceeded"
        [out] = run(llm, [[5] * 40], SamplingParams(max_tokens=None, ignore_eos=True))
        assert out.outputs[0].finish_reason == "length" and len(out.outputs[0].token_ids) == 64 - 40 + 1
        *_, last = neighbour
        assert last.outputs[0].finish_reason == "length"


def test_streams_are_cumulative_snapshots(llm):
    seen = list(llm.stream("the quick", GREEDY))
    assert [len(out.outputs[0].token_ids) for out in seen] == [1, 2, 3, 4, 5, 6]
    assert [out.finished for out in seen] == [False] * 5 + [True]
    texts = [out.outputs[0].text for out in seen]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


def test_a_stream_left_in_any_way_frees_its_blocks(llm):
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    closed = llm.stream("a", long)
    next(closed)
    closed.close()
    assert_idle(llm)
    with pytest.raises(ZeroDivisionError):
        for _ in llm.stream("a", long):
            raise ZeroDivisionError
    gc.collect()
    assert_idle(llm)
    never_started = llm.stream("a", long)
    del never_started
    assert_idle(llm)
    with pytest.raises(RequestError):
        llm.stream([], long)  # at once, not at the first next()


@pytest.mark.parametrize("behind", [0, 1])
def test_stop_string_ends_the_engines_request_too(tmp_path, behind):
    folder, ids = checkpoints.write_scripted_model(tmp_path, ["The", " quick", " br", "own", " fox", " jumps"])
    with engine(folder, behind) as llm:
        [out] = run(llm, [[10]], SamplingParams(temperature=0, max_tokens=50, stop="own fox"))
        answer = out.outputs[0]
        assert (answer.text, answer.stop_reason, answer.token_ids) == ("The quick br", "own fox", ids[:5])
        assert llm.engine.stats().tokens_out == 5
        assert [e["reason"] for e in llm.engine.trace.events if e["ev"] == "finish"] == ["stop"]


def fail_once(monkeypatch, llm, error):
    launch, calls = llm.engine.runner.launch, []

    def broken(step):
        calls.append(step)
        if len(calls) == 3:
            raise error
        return launch(step)

    monkeypatch.setattr(llm.engine.runner, "launch", broken)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_failed_step_fails_its_requests_only(checkpoint, monkeypatch, behind):
    with engine(checkpoint("llama"), behind, max_num_seqs=2) as llm:
        want = tokens(run(llm, [[5, 6, 7]], GREEDY))
        survivor = llm.stream([9, 9, 9], GREEDY)  # not started: in none of the failing steps
        fail_once(monkeypatch, llm, RuntimeError("the device is on fire"))
        with pytest.raises(EngineStepError, match="the device is on fire"):
            run(llm, [[5, 6, 7], [8, 9, 10]], GREEDY)
        assert_idle(llm)
        assert len(list(survivor)[-1].outputs[0].token_ids) == 6
        assert tokens(run(llm, [[5, 6, 7]], GREEDY)) == want


@pytest.fixture
def interruptible():
    """A job in a shell's background is started with SIGINT ignored; here it must do what it does in a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_frees_everything_and_the_engine_lives(checkpoint, interruptible):
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with engine(checkpoint("llama")) as llm:
        want = tokens(run(llm, [[5, 6, 7]], GREEDY))
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                run(llm, [[5, 6, 7], [8, 9]], params)
        timer.join()
        assert_idle(llm)
        assert tokens(run(llm, [[5, 6, 7]], GREEDY)) == want


def interrupt_generate(signum, frame):
    """KeyboardInterrupt, but only for who is inside `generate`: a late second one would end the tests."""
    while frame is not None:
        if frame.f_code is LLM.generate.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


def test_ctrl_c_twice_loses_nothing_either(interruptible, checkpoint):
    signal.signal(signal.SIGINT, interrupt_generate)
    params = SamplingParams(n=2, max_tokens=300, ignore_eos=True)
    with engine(checkpoint("llama"), num_kv_blocks=400) as llm:
        for trial in range(8):

            def press_twice(delay=0.02 + trial * 0.003):
                for pause in (delay, 0.0005):
                    time.sleep(pause)
                    os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=press_twice)
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                run(llm, [[5] * 30] * 12, params)
            thread.join()
            run(llm, [[9]], GREEDY)
            assert_idle(llm)


def test_generate_and_stream_from_several_threads(checkpoint):
    with engine(checkpoint("llama")) as llm:
        want = tokens(run(llm, [[5, 6, 7], [8, 9]], GREEDY))
        got: list[Any] = []

        def generate():
            got.append(tokens(run(llm, [[5, 6, 7], [8, 9]], GREEDY)))

        def stream():
            got.append([[*llm.stream(ids, GREEDY)][-1].outputs[0].token_ids for ids in ([5, 6, 7], [8, 9])])

        threads = [threading.Thread(target=work, daemon=True) for work in (generate, stream, generate, stream)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert got == [want] * 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_under_the_trace_ends_the_trace_only(checkpoint, capfd):
    trace = Trace("/dev/full")
    with LLM(str(checkpoint("llama")), trace=trace, quiet=True, device="cpu", num_kv_blocks=200) as llm:
        for _ in "ab":
            outs = run(llm, [[5, 6]] * 20, SamplingParams(max_tokens=60, ignore_eos=True, n=2))
            assert all(out.finished for out in outs)
        assert_idle(llm)
    assert capfd.readouterr().err.count("the trace file ends here") == 1


def test_ctrl_c_in_the_middle_of_a_step(checkpoint, monkeypatch):
    with engine(checkpoint("llama")) as llm:
        fail_once(monkeypatch, llm, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(llm, [[5, 6, 7]], GREEDY)
        assert_idle(llm)
        assert len(tokens(run(llm, [[5, 6, 7]], GREEDY))[0]) == 6


def test_stats_from_another_thread(checkpoint):
    with engine(checkpoint("llama")) as llm:
        stop, seen = threading.Event(), []

        def watch():
            while not stop.is_set():
                stats = llm.engine.stats()
                seen.append(stats.kv_blocks_free + stats.kv_blocks_cached + stats.kv_blocks_in_use)
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        run(llm, [[5, 6, 7]] * 8, GREEDY)
        stop.set()
        watcher.join()
        assert seen and set(seen) == {llm.engine.stats().kv_blocks_total}


def test_metrics_count_what_the_user_got(checkpoint):
    with engine(checkpoint("llama")) as llm:
        run(llm, [[5, 6, 7]] * 3, GREEDY)
        abandoned = llm.stream([9], SamplingParams(max_tokens=50, ignore_eos=True))
        next(abandoned)
        abandoned.close()
        run(llm, [[5]], SamplingParams(temperature=0, max_tokens=1))
        value = llm.metrics.registry.get_sample_value
        assert value("labkit_prompt_tokens_total") == 3 * 3 + 1 + 1
        assert value("labkit_generation_tokens_total") == llm.engine.stats().tokens_out == 3 * 6 + 1 + 1
        assert value("labkit_requests_total", {"finish_reason": "length"}) == 4
        assert value("labkit_requests_total", {"finish_reason": "abort"}) == 1
        assert value("labkit_time_to_first_token_seconds_count") == 5
        assert value("labkit_inter_token_latency_seconds_count") == 3 * 5
        assert value("labkit_kv_cache_usage_ratio") == 0
        assert b"labkit_step_tokens_bucket" in llm.metrics.render()


def test_unseeded_requests_follow_the_engines_seed(checkpoint):
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def answers(seed):
        with engine(checkpoint("llama"), seed=seed) as llm:
            return tokens(run(llm, [[5, 6, 7]] * 3, params))

    first = answers(0)
    assert first == answers(0) != answers(1)
    assert len(set(map(tuple, first))) == 3


def test_closing(checkpoint):
    llm = LLM(str(checkpoint("llama")), device="cpu", num_kv_blocks=16, quiet=True)
    open_stream = llm.stream([5], GREEDY)
    next(open_stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        run(llm, [[5]], GREEDY)
    with pytest.raises(EngineClosedError):
        list(open_stream)
    assert llm.engine.stats().kv_bytes > 0


def test_chat_takes_one_talk_or_several(llm):
    talk = [{"role": "user", "content": "hello"}]
    [one] = llm.chat(talk, GREEDY, use_tqdm=False)
    two = llm.chat([talk, talk], GREEDY, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in two] == [one.outputs[0].token_ids] * 2
    assert one.prompt_token_ids == llm.tokenizer.apply_chat_template(talk)
    assert one.prompt == llm.tokenizer.render_chat(talk) and "hello" in one.prompt


def test_several_choices_of_a_scored_prompt(llm):
    scoring = SamplingParams(n=3, max_tokens=0, prompt_logprobs=1)
    [out] = run(llm, [[5, 6, 7]], scoring)
    assert [(c.token_ids, c.finish_reason) for c in out.outputs] == [([], "length")] * 3
    assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 3
    [out] = run(llm, [[5, 6]], SamplingParams(n=2, max_tokens=None, min_tokens=5, prompt_logprobs=1))
    assert all(len(c.token_ids) >= 5 for c in out.outputs) and len(out.prompt_logprobs or ()) == 2
    assert_idle(llm)
