"""What clients ask a server for, and when.

    name      shared   own tokens in      tokens out        arrives             like
    chat          64   about 160          about 180         Poisson, 2/s        people who type to an assistant
    rag          128   about 900          about 100         Poisson, 1/s        questions, with pages found for them
    coding        32   about 500          about 200         closed loop, 8      agents: a call needs the last one
    support      512   about 80           about 100         bursts of 16, 1/s   a fault, and everybody writes
    httpN          0   100–1024 uniform   100–512 uniform   closed loop, N      the usual comparison of servers

"About" is the median of a log-normal distribution that is cut at both ends: lengths of real traffic have such a long
tail. The numbers are chosen so that all fits into 2048 tokens; they are no measurement of anybody's traffic.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

from labkit.bench.load.arrivals import Arrival, Bursts, Closed, Poisson, Recorded, times
from labkit.errors import LabkitError

LARGEST_ID = 10_000  # prompts are drawn from 0 to this, or to what the vocabulary has
OPEN_SECONDS = 30.0  # for which an open loop sends
WORDS = (
    "the of and to in is that it for was on are with as at be this have from or one had by but not what all were we "
    "when your can said there use an each which she do how their if will up other about out many then them these so"
).split()  # about one token each in most vocabularies


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from low to high, all as likely."""

    low: int
    high: int

    def draw(self, r: Random) -> int:
        return r.randint(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """Half of them below the median; sigma is the deviation of the logarithm. Cut to low and high."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, r: Random) -> int:
        return min(max(round(r.lognormvariate(math.log(self.median), self.sigma)), self.low), self.high)


@dataclass(frozen=True)
class Shape:
    """A kind of traffic.

    Attributes:
        shared: tokens that all prompts begin with, a system prompt.
        tokens_in: of each prompt's own, after the shared ones.
        arrival: unless another one is asked for.
    """

    shared: int
    tokens_in: Uniform | LogNormal
    tokens_out: Uniform | LogNormal
    arrival: Arrival


SHAPES = {
    "chat": Shape(64, LogNormal(160, 0.8, 16, 1024), LogNormal(180, 0.7, 16, 512), Poisson(2.0)),
    "rag": Shape(128, LogNormal(900, 0.3, 400, 1500), LogNormal(100, 0.6, 16, 300), Poisson(1.0)),
    "coding": Shape(32, LogNormal(500, 0.7, 64, 1400), LogNormal(200, 0.7, 32, 512), Closed(8)),
    "support": Shape(512, LogNormal(80, 0.7, 16, 400), LogNormal(100, 0.6, 16, 300), Bursts(1.0, 16)),
}
HTTP = re.compile(r"http([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        prompt: token ids.
        text: a system message (may be empty) and a user's, with about as many tokens, for the chat API.
        due_s: when to send it, in seconds since the run began; None in a closed loop, when a client is free.
    """

    prompt: list[int]
    text: tuple[str, str]
    max_tokens: int
    due_s: float | None = None


@dataclass(frozen=True)
class Load:
    """The requests of one run; a function of workload, arrival, number, vocabulary and seed alone.

    Attributes:
        name: of the workload, with how its requests arrive where the name does not say that.
    """

    name: str
    arrival: Arrival
    seed: int
    temperature: float
    asks: list[Ask]

    @property
    def clients(self) -> int | None:
        """Of a closed loop; None in an open one."""
        return self.arrival.clients if isinstance(self.arrival, Closed) else None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(ask.prompt) + ask.max_tokens for ask in self.asks)


def shape_of(name: str) -> Shape:
    """Raises LabkitError if there is no workload of that name."""
    if (http := HTTP.fullmatch(name)) is not None:
        return Shape(0, Uniform(100, 1024), Uniform(100, 512), Closed(int(http[1])))
    if name not in SHAPES:
        raise LabkitError(f"there is no workload {name!r}; known ones: {', '.join(SHAPES)}, and http64, http256, httpN")
    return SHAPES[name]


def number_of(arrival: Arrival) -> int:
    """How many requests a run has unless told."""
    match arrival:
        case Closed(clients=clients):
            return max(4 * clients, min(8 * clients, 512))
        case Recorded(rows=rows):
            return len(rows)
        case _:
            return max(1, round(arrival.rate * OPEN_SECONDS))


def make_load(
    workload: str,
    arrival: Arrival | None = None,
    requests: int | None = None,
    vocab_size: int = LARGEST_ID + 1,
    seed: int = 0,
    temperature: float = 0.6,
) -> Load:
    """A run's requests; arrival and number are the workload's own unless given.

    Raises:
        LabkitError: there is no workload of that name.
    """
    shape = shape_of(workload)
    arrival = shape.arrival if arrival is None else arrival
    count = number_of(arrival) if requests is None else requests
    # Random takes all of a text as its seed. The shared beginning is the same in every run; lengths are the same under
    # every load with that seed; the rest differs, or one load would find the last one's prompts in the prefix cache.
    shared, lengths, own = Random(workload), Random(f"{workload} {seed}"), Random(f"{workload} {seed} {arrival}")
    largest = min(LARGEST_ID, vocab_size - 1)
    prefix, system = _ids(shape.shared, largest, shared), _words(shape.shared, shared)
    asks = []
    for number, due in enumerate(times(arrival, count, own)):
        came, went = shape.shared + shape.tokens_in.draw(lengths), shape.tokens_out.draw(lengths)
        if isinstance(arrival, Recorded):  # the recording tells all but the tokens themselves
            came, went = arrival.rows[number].prompt_tokens, arrival.rows[number].output_tokens
        rest = max(0, came - shape.shared)
        asks.append(Ask(prefix[:came] + _ids(rest, largest, own), (system, _words(rest or 1, own)), went, due))
    name = workload if arrival == shape.arrival else f"{workload}, {arrival}"
    return Load(name, arrival, seed, temperature, asks)


def _ids(count: int, largest: int, r: Random) -> list[int]:
    return [r.randint(0, largest) for _ in range(count)]


def _words(count: int, r: Random) -> str:
    return " ".join(r.choices(WORDS, k=count))
