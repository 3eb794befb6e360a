"""A request as the engine sees it: one `Sequence` for each answer that was asked for.

prompt_token_ids          output_token_ids num_pending
├───────────────────────┤├───────────────┤├───────────┤  pending: drawn on the device by a step that is not booked yet
├────── num_computed ──────────┤                         keys and values of these are in the cache, or a launched step
                               ├──────────────────────┤  writes them; the next step computes some of these
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from labkit.config import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class EngineRequest:
    """What enters the engine: token ids in, nothing else to look up. It crosses the process boundary."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in the making.

    Attributes:
        id: its name in the trace; the request's id, with "/index" when the request asked for n > 1 answers.
        seed: the request's own, or one drawn from (engine seed, number of the request).
        max_tokens: most output tokens, cut to what the model's length and the KV pool can hold.
        eos_token_ids: ids that end it; empty with ignore_eos.
        leader: choice 0 of the same request, whose prompt blocks this one may share.
        num_in_flight: of num_computed, those that launched steps compute. Meanwhile it keeps slot and blocks.
        slot: its row in the runner's device tensors while it runs.
        block_table: physical block ids, in order of position.
    """

    id: str
    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    number: int  # order of arrival, over the engine's whole life
    arrival_time: float
    leader: Sequence | None = None
    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the first admission found in the cache
    slot: int | None = None
    block_table: list[int] = field(default_factory=list)
    token_on_device: bool = False  # its last token was, or is being, drawn in the slot it holds now
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # of its prompt, already reported

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens + self.num_pending - self.num_computed

    @property
    def has_drawn_all(self) -> bool:
        """Its last token is drawn already, booked or not."""
        return len(self.output_token_ids) + self.num_pending >= self.max_tokens

    @property
    def prompt_is_computed(self) -> bool:
        return self.num_computed - self.num_in_flight >= len(self.prompt_token_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions start to stop - 1, prompt and output as one sequence."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - split]

    def append(self, token: int) -> str | None:
        """Book a drawn token; returns the reason if it ends the answer ("stop" wins over "length")."""
        self.output_token_ids.append(token)
        count = len(self.output_token_ids)
        if count >= self.params.min_tokens:
            if token in self.eos_token_ids:
                return "stop"
            if token in (self.params.stop_token_ids or ()):
                self.stop_reason = token
                return "stop"
        return "length" if count >= self.max_tokens else None


@dataclass(slots=True)
class Chunk:
    """One sequence's share of a step: positions start to start + length - 1.

    Attributes:
        draws: it reaches the last known token, so that the next one can be drawn.
        is_decode: one token whose id the device already knows, because it drew it in this slot.
    """

    seq: Sequence
    start: int
    length: int
    new_blocks: list[int]  # taken for it by this step, already appended to seq.block_table
    draws: bool
    is_decode: bool


@dataclass(slots=True)
class Step:
    """What runs together: decodes first, then chunks of prompts."""

    number: int
    scheduled_time: float  # on the trace's clock
    chunks: list[Chunk]
    admitted: list[Sequence]  # got a slot in this step (again, after a preemption)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, its rank (1 = most likely), and the k best."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class ChunkResult:
    """What the runner found for one chunk of a step."""

    token: int | None  # None when the chunk does not draw
    logprobs: TokenLogprobs | None = None  # when params.logprobs is set and a token was drawn
    prompt_logprobs: list[TokenLogprobs] | None = None  # of positions start+1 … that lie in the prompt


@dataclass
class StepReport:
    """What one step did, for whoever drives the engine."""

    deltas: list[Delta]
    num_tokens: int = 0  # prompt and output tokens computed
    seconds: float = 0.0


class Delta(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step gave to one answer. It crosses the process boundary, by the thousand: without the fields' names.

    `token_ids` are new ones only; `finish_reason` is set once, with the last.
    """

    request_id: str
    index: int
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None  # the step failed: why
    num_cached_tokens: int = 0
    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    choices: int = 1  # how many answers its request has
