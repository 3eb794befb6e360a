"""Exceptions that come from outside, at any line: no block, slot or request may be lost, and the engine goes on."""

from __future__ import annotations

import itertools
import linecache
import random
import signal
import sys
import time

import pytest

from labkit import SamplingParams
from labkit.errors import EngineClosedError, EngineStepError, RequestError
from tests.integration.conftest import assert_idle, engine, run, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=6)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
BOOKS = ("labkit/llm.py", "labkit/engine/core.py", "labkit/engine/scheduler.py", "labkit/cache/blocks.py")


class Bolt(BaseException):
    """Strikes from outside."""


class strike:
    """Raises a Bolt when the `nth` line of the books is about to run; counts them all with nth = -1."""

    def __init__(self, nth: int):
        self.nth, self.lines = nth, 0

    def trace(self, frame, event, arg):
        if not frame.f_code.co_filename.endswith(BOOKS) or frame.f_code.co_name in ("stats", "close", "_cancel"):
            return None
        # A `with` is shown as a line once more when it ends, where no real exception could come. And of a clean-up,
        # what was not even begun cannot be done.
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if text.startswith(("with self._lock", "if not finished:", "self._cancel(", "for request_id in open_ids:")):
            return self.trace
        if event == "line":
            self.lines += 1
            if self.lines == self.nth:
                raise Bolt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)


def work(llm):
    stream = llm.stream([3, 4, 5], GREEDY)
    next(stream)
    run(llm, [list(range(5, 40)), [8, 9]], SamplingParams(temperature=0, max_tokens=3, n=2))
    stream.close()


@pytest.mark.parametrize("behind", [0, 2])
def test_a_bolt_on_any_line_costs_no_block(checkpoint, behind):
    with engine(checkpoint("llama"), behind, num_kv_blocks=12) as llm:
        work(llm)
        with strike(-1) as count:
            work(llm)
        want = tokens(run(llm, [[5, 6, 7]], GREEDY))
        for nth in sorted(random.Random(behind).sample(range(1, count.lines), 150)):
            where = ""
            try:
                with strike(nth):
                    work(llm)
            except Bolt as bolt:
                where = str(bolt)
            assert tokens(run(llm, [[5, 6, 7]], GREEDY)) == want, where
            stats = llm.engine.stats()
            assert (stats.running, stats.waiting, stats.kv_blocks_in_use) == (0, 0, 0), where
            assert not llm._mailboxes and not llm._processor._open, where


@pytest.mark.parametrize("method", ["launch", "results"])
def test_ctrl_c_two_steps_behind(checkpoint, monkeypatch, method):
    with engine(checkpoint("llama"), 2, num_kv_blocks=40) as llm:
        want = tokens(run(llm, [[5, 6, 7]], GREEDY))
        original = llm.engine.runner.launch
        for nth in range(1, 8):
            calls = itertools.count(1)

            def launch(step, nth=nth, calls=calls):
                launched = original(step)
                if method == "launch":
                    if next(calls) == nth:
                        raise KeyboardInterrupt
                    return launched
                results = launched.results

                def interrupted():
                    if next(calls) >= nth:
                        raise KeyboardInterrupt
                    return results()

                launched.results = interrupted
                return launched

            monkeypatch.setattr(llm.engine.runner, "launch", launch)
            with pytest.raises(KeyboardInterrupt):
                run(llm, [[5, 6, 7], [8, 9]], LONG)
            monkeypatch.setattr(llm.engine.runner, "launch", original)
            assert_idle(llm)
            assert tokens(run(llm, [[5, 6, 7]], GREEDY)) == want


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_an_alarms_exception_comes_between_steps_as_itself(checkpoint):
    def ring(signum, frame):
        raise TimeoutError("the time is up")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with engine(checkpoint("llama")) as llm:
            for trial in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.001 * trial)
                with pytest.raises(TimeoutError, match="the time is up"):
                    while True:
                        run(llm, [[5, 6, 7], [8, 9]], LONG) if trial % 2 else list(llm.stream([5, 6], LONG))
                assert_idle(llm)
                assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_others_learn_that_their_step_was_cut(checkpoint, monkeypatch):
    with engine(checkpoint("llama")) as llm:
        other = llm.stream([9, 9], LONG)
        next(other)
        launch = llm.engine.runner.launch
        monkeypatch.setattr(llm.engine.runner, "launch", lambda step: (_ for _ in ()).throw(Bolt()))
        with pytest.raises(Bolt):
            run(llm, [[5, 6, 7]], GREEDY)
        monkeypatch.setattr(llm.engine.runner, "launch", launch)
        with pytest.raises(EngineStepError, match="interrupted"):
            list(other)
        assert len(tokens(run(llm, [[5, 6, 7]], GREEDY))[0]) == 6


def test_a_refused_request_leaves_nothing_behind(checkpoint, monkeypatch):
    def refuse(request):
        raise RequestError("not today")

    with engine(checkpoint("llama")) as llm:
        monkeypatch.setattr(llm.engine, "add_request", refuse)
        for use in (lambda: next(llm.stream([5], GREEDY)), lambda: run(llm, [[5], [6]], GREEDY)):
            with pytest.raises(RequestError, match="not today"):
                use()
            assert not llm._mailboxes and not llm._processor._open
        monkeypatch.undo()
        assert len(tokens(run(llm, [[5, 6, 7]], GREEDY))[0]) == 6


def test_one_answer_that_cannot_be_put_in_words_fails_alone(checkpoint, monkeypatch):
    with engine(checkpoint("llama")) as llm:
        [want] = tokens(run(llm, [[5, 6, 7]], GREEDY))
        good, bad = llm.stream([5, 6, 7], GREEDY), llm.stream([8, 9], GREEDY)
        next(good), next(bad)
        entry = llm._processor._open[next(iter(set(llm._processor._open) - {next(iter(llm._processor._open))}))]
        monkeypatch.setattr(entry.detokenizers[0], "push", lambda *_: 1 / 0)
        *_, last = good
        assert last.outputs[0].token_ids == want
        with pytest.raises(EngineStepError, match=r"ZeroDivisionError"):
            list(bad)
        assert_idle(llm)


def test_gauges_are_right_when_nothing_runs(checkpoint):
    with engine(checkpoint("llama")) as llm:
        value = llm.metrics.registry.get_sample_value
        stream = llm.stream([9], LONG)
        next(stream)
        assert value("labkit_num_requests_running") == 1
        stream.close()
        assert value("labkit_num_requests_running") == value("labkit_kv_cache_usage_ratio") == 0
        assert value("labkit_requests_total", {"finish_reason": "abort"}) == 1
        stream = llm.stream([9], SamplingParams(n=3, max_tokens=50, ignore_eos=True))
        next(stream)
        stream.close()
        run(llm, [[9]], SamplingParams(n=3, max_tokens=2, ignore_eos=True))
        assert value("labkit_requests_total", {"finish_reason": "abort"}) == 2, "requests, not answers"
        assert value("labkit_requests_total", {"finish_reason": "length"}) == 1
        text = run(llm, [[9]], GREEDY)[0].outputs[0].text
        run(llm, [[9]], SamplingParams(temperature=0, max_tokens=100, stop=text[:2]))
        assert value("labkit_num_requests_running") == value("labkit_kv_cache_usage_ratio") == 0


def test_closing_with_an_open_stream(checkpoint):
    with engine(checkpoint("llama")) as llm:
        stream = llm.stream([9], LONG)
        next(stream)
        llm.close()
        assert_idle(llm)
        assert llm.metrics.registry.get_sample_value("labkit_num_requests_running") == 0
        assert llm.metrics.registry.get_sample_value("labkit_requests_total", {"finish_reason": "abort"}) == 1
        with pytest.raises(EngineClosedError):
            next(stream)
        assert not llm._mailboxes


def test_work_that_takes_time_is_cut_by_an_alarm_soon(checkpoint):
    """A handler waits for the end of a step, not of the whole call."""
    rung: list[float] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    try:
        with engine(checkpoint("llama")) as llm:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            run(llm, [[5, 6]] * 4, LONG)
            assert rung and time.monotonic() - rung[0] > 0.02, "it was told at the end"
    finally:
        signal.signal(signal.SIGALRM, before)
