"""From what the engine's steps give (token ids) to what a user sees (text, logprobs, reasons).

It lives where the user is: in the caller's thread for `LLM`, in the HTTP process for `labkit serve`, so that
detokenising never holds up a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from labkit.engine.detokenizer import Detokenizer, StopStrings
from labkit.engine.request import Delta, EngineRequest, TokenLogprobs
from labkit.models.tokenizer import Tokenizer
from labkit.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


@dataclass
class Processed:
    """What a step meant for the requests that are known here.

    `outputs` are the live objects that later steps go on changing: copy what must stay. `stops` are answers that
    a stop string ended (request id, index, string): the engine must be told before its next step. `errors` maps
    requests that have failed to the reason: a step did, or what it gave cannot be put into words. The latter still
    run, so cancel all of them.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    stops: list[tuple[str, int, str]] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass
class _Open:
    """A request that is not finished yet."""

    request: EngineRequest
    output: RequestOutput
    detokenizers: list[Detokenizer]
    latest: dict[int, Delta] = field(default_factory=dict)  # of each answer, for its times


class OutputProcessor:
    """Keeps the text of every open request and cuts it at stop strings."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._open: dict[str, _Open] = {}

    def add(self, request: EngineRequest, prompt: str | None = None) -> RequestOutput:
        """Begin a request; the output returned is the live one."""
        params = request.params
        logprobs = params.logprobs is not None
        output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[
                CompletionOutput(i, logprobs=[] if logprobs else None, cumulative_logprob=0.0 if logprobs else None)
                for i in range(params.n)
            ],
            finished=False,
            num_cached_tokens=0,
            metrics=RequestMetrics(arrival_time=0.0),
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )
        stop = StopStrings(params.stop) if params.stop else None
        detokenizers = [
            Detokenizer(
                self._tokenizer,
                stop,
                params.include_stop_str_in_output,
                params.min_tokens,
                params.skip_special_tokens,
            )
            for _ in range(params.n)
        ]
        self._open[request.request_id] = _Open(request, output, detokenizers)
        return output

    def discard(self, request_id: str) -> None:
        """Forget a request; what later steps say of it is passed over."""
        self._open.pop(request_id, None)

    def process(self, deltas: list[Delta]) -> Processed:
        """Book the deltas of one step.

        Where a stop string ends an answer, the delta itself is corrected (tokens, finish_reason), so that metrics
        made from it afterwards count what the user got.
        """
        done = Processed()
        touched: dict[str, RequestOutput] = {}
        for delta in deltas:
            entry = self._open.get(delta.request_id)
            if entry is None or entry.output.outputs[delta.index].finish_reason is not None:
                continue
            touched[delta.request_id] = entry.output
            if delta.error is not None:
                done.errors[delta.request_id] = delta.error
            try:
                stop = self._book(entry, delta)
            except Exception as error:  # a tokenizer's or a learner's fault: the others must not pay for it
                done.errors[delta.request_id] = f"the answer's text failed: {type(error).__name__}: {error}"
                self._fail(entry)
                continue
            if stop is not None:
                done.stops.append((delta.request_id, delta.index, stop))
            if all(c.finish_reason is not None for c in entry.output.outputs):
                entry.output.finished = True
                del self._open[delta.request_id]
        done.outputs = list(touched.values())
        return done

    def _fail(self, entry: _Open) -> None:
        for completion in entry.output.outputs:
            completion.finish_reason = completion.finish_reason or "abort"
        entry.output.finished = True
        del self._open[entry.request.request_id]

    def _book(self, entry: _Open, delta: Delta) -> str | None:
        """Adds a delta to its answer; returns a stop string that ended it while the engine thinks that it goes on."""
        output, completion = entry.output, entry.output.outputs[delta.index]
        if delta.index == 0:  # the one that computes the prompt
            output.num_cached_tokens = delta.num_cached_tokens
            if output.prompt_logprobs is not None and delta.prompt_logprobs:
                output.prompt_logprobs.extend(self._logprobs(entry) for entry in delta.prompt_logprobs)
        engine_goes_on = delta.finish_reason is None
        stop = self._add_tokens(entry, completion, delta) if entry.request.params.detokenize else None
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        completion.token_ids.extend(delta.token_ids)
        if completion.logprobs is not None and delta.logprobs is not None:
            for entry_logprobs in delta.logprobs[: len(delta.token_ids)]:
                completion.logprobs.append(self._logprobs(entry_logprobs))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry_logprobs.logprob
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        entry.latest[delta.index] = delta
        output.metrics = _times(delta) if len(output.outputs) == 1 else _times_of_all(entry)
        return stop if engine_goes_on else None

    def _add_tokens(self, entry: _Open, completion: CompletionOutput, delta: Delta) -> str | None:
        """Text of the new tokens; on a stop string the tokens after the one that completed it are dropped."""
        detokenizer = entry.detokenizers[delta.index]
        stop = None
        for i, token in enumerate(delta.token_ids):
            last = i == len(delta.token_ids) - 1
            # The token that ends an answer is counted, not shown; a stop_token_ids one is shown when asked for.
            ends = last and delta.finish_reason == "stop"
            shown = not ends or (delta.stop_reason is not None and entry.request.params.include_stop_str_in_output)
            stop = detokenizer.push(token, shown)
            if stop is not None:
                del delta.token_ids[i + 1 :]
                break
        if stop is None and delta.finish_reason is not None:
            stop = detokenizer.finish()
        completion.text = detokenizer.visible
        return stop

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        out = {
            token: Logprob(value, rank, self._text(token))
            for rank, (token, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
        }
        out[entry.token] = Logprob(entry.logprob, entry.rank, self._text(entry.token))
        return out

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _times(delta: Delta) -> RequestMetrics:
    return RequestMetrics(
        arrival_time=delta.arrival_time,
        first_scheduled_time=delta.first_scheduled_time,
        first_token_time=delta.first_token_time,
        finished_time=delta.finished_time,
        num_preemptions=delta.num_preemptions,
    )


def _times_of_all(entry: _Open) -> RequestMetrics:
    """Over all answers: the first begin, the last end, and every preemption."""
    deltas = list(entry.latest.values())
    ends = [delta.finished_time for delta in deltas]
    ended = len(deltas) == len(entry.output.outputs) and None not in ends
    return RequestMetrics(
        arrival_time=deltas[0].arrival_time,
        first_scheduled_time=_extreme(min, [delta.first_scheduled_time for delta in deltas]),
        first_token_time=_extreme(min, [delta.first_token_time for delta in deltas]),
        finished_time=_extreme(max, ends) if ended else None,
        num_preemptions=sum(delta.num_preemptions for delta in deltas),
    )


def _extreme(choose: Callable[[list[float]], float], times: list[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return choose(known) if known else None
