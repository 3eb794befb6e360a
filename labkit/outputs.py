"""What a request gives back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Natural log of the model's own probability of a token, before temperature, bias, penalties and filters."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None


@dataclass
class RequestMetrics:
    """Seconds since the engine's start, None until the moment has come."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class CompletionOutput:
    """One answer to a prompt; a request with n > 1 has several."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: int | str | None = None  # the stop string or stop token id; None for the end-of-sequence token


@dataclass
class RequestOutput:
    """A prompt and its answers so far; `finished` when every answer has its finish_reason."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
