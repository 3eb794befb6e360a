"""From a request to its sequences, one for each answer, and from what a step gave a sequence to what is told of it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

from labkit.config import SamplingParams
from labkit.engine.request import ChunkResult, Delta, EngineRequest, Sequence, TokenLogprobs


def make_sequences(
    request: EngineRequest, number: int, seed: int, most: int, eos_token_ids: Iterable[int], arrival: float
) -> list[Sequence]:
    """The sequences of a request, the leader first.

    Args:
        number: of the request, in the engine's life
        seed: the request's own, or `request_seed`'s
        most: output tokens that there is room for
        eos_token_ids: the model's
        arrival: on the trace's clock
    """
    params = request.params
    # Scoring alone (max_tokens 0) still runs one step; the token it draws is dropped when it is reported.
    max_tokens = most if params.max_tokens is None else max(1, params.max_tokens)
    out: list[Sequence] = []
    for index in range(params.n):
        seq = Sequence(
            id=request.request_id if params.n == 1 else f"{request.request_id}/{index}",
            request_id=request.request_id,
            index=index,
            prompt_token_ids=request.prompt_token_ids,
            params=params if index == 0 else _without_prompt_logprobs(params),
            seed=seed,
            max_tokens=max_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else frozenset(eos_token_ids),
            number=number,
            arrival_time=arrival,
            leader=out[0] if out else None,
        )
        out.append(seq)
    return out


def request_seed(engine_seed: int, number: int) -> int:
    """The seed of a request that brings none: 64 bits from (engine seed, number of the request)."""
    text = f"{engine_seed}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _without_prompt_logprobs(params: SamplingParams) -> SamplingParams:
    """Further choices of a request share its prompt: one of them is enough to score it.

    Unless scoring is all that is asked for (max_tokens 0): then each is a request to score, and gives no token.
    """
    if params.prompt_logprobs is None or params.max_tokens == 0:
        return params
    return dataclasses.replace(params, prompt_logprobs=None)


def make_delta(
    seq: Sequence,
    tokens: list[int] | None = None,
    result: ChunkResult | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    error: str | None = None,
) -> Delta:
    """What a step gave to a sequence, or how it ended.

    Args:
        tokens: the new ones
        prompt_logprobs: those that are new
        error: why it ended, if that was an error
    """
    logprobs = [result.logprobs] if result is not None and result.logprobs is not None else None
    finish_reason, stop_reason = seq.finish_reason, seq.stop_reason
    if tokens and seq.params.max_tokens == 0:
        tokens, logprobs, finish_reason, stop_reason = [], None, "length", None
    return Delta(
        request_id=seq.request_id,
        index=seq.index,
        token_ids=tokens or [],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        num_cached_tokens=seq.num_cached_tokens,
        arrival_time=seq.arrival_time,
        first_scheduled_time=seq.first_scheduled_time,
        first_token_time=seq.first_token_time,
        finished_time=seq.finished_time,
        num_preemptions=seq.num_preemptions,
        choices=seq.params.n,
    )
