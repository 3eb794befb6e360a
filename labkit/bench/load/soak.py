"""`labkit bench soak`: clients of every kind at once, for minutes. Is any answer wrong, does anything pile up?

Each client draws what it does next:

    read      60%   takes a seeded answer, streamed or whole: it must be what the same request gave alone
    leave     15%   drops the connection at some chunk: what it got must be the beginning of that
    dawdle    10%   pauses between chunks: the same, and the server may give it up with an error
    nonsense  15%   sends a request that must be refused with a 4xx and the shape of an error

Meanwhile the server's processes are looked at once a second: memory, file descriptors, threads, and its gauges.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
from tqdm import tqdm

from labkit.bench.load.client import AnswerError, Target, open_session, read_events
from labkit.bench.load.leaks import Watch, judge
from labkit.bench.load.record import SCHEMA, Check, SoakRecord
from labkit.bench.load.servers import Place, Remote, Server, start_ours
from labkit.bench.machine import describe_machine
from labkit.kernels import backend
from labkit.models.checkpoint import open_checkpoint

QUESTIONS = 24  # different seeded requests
LARGEST_ID = 1000  # of their prompts; small enough for any vocabulary
MODEL_LENGTH = 512
# A small pool is soon written everywhere, so that memory is flat from then on; and requests are preempted.
POOL = {"num_kv_blocks": 256}
SECONDS_TO_IDLE = 10.0
SHOWN = 10  # of what was wrong
SLOW_BUFFER = 4096  # bytes; longer than any event
NONSENSE: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": [-1]},
    {"prompt": None},
    {"max_tokens": -1},
    {"max_tokens": 10**9},
    {"temperature": "hot"},
    {"model": "nobody's"},
    {"unheard_of": 1},
    {"stop": [""]},
)


@dataclass(frozen=True)
class SoakSettings:
    """What is asked of whom; `engine` are fields of EngineConfig for the server that is started."""

    model: str
    url: str | None = None
    key: str = Target.key
    clients: int = 64
    seconds: float = 300.0
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """A seeded request and the text it gives when it is alone."""

    body: dict[str, Any]
    text: str


class Crowd:
    """Clients that do as they like until the time is up.

    Attributes:
        outcomes: what was done and how it ended -> how often.
        wrong: what should not have been.
    """

    def __init__(self, session: aiohttp.ClientSession, target: Target, questions: list[Question]):
        self._session, self._target, self._questions = session, target, questions
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def client(self, r: Random, until: float) -> None:
        habits = (self.read, self.leave, self.dawdle, self.nonsense)
        while time.monotonic() < until:
            (habit,) = r.choices(habits, (60, 15, 10, 15))
            name, question = habit.__name__, r.choice(self._questions)
            try:
                end = await habit(question, r)
            except AnswerError as error:
                end = str(error)
                self.wrong.append(f"{name}: {end}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                end = f"connection: {type(error).__name__}"
                self.wrong.append(f"{name}: {end} {error}")
            self.outcomes[f"{name}: {end}"] += 1

    async def read(self, question: Question, r: Random) -> str:
        stream = r.random() < 0.7
        text = await self.whole(question.body) if not stream else await self.streamed(question.body)
        self._compare(question, text, text == question.text)
        return "streamed" if stream else "whole"

    async def leave(self, question: Question, r: Random) -> str:
        """Before the first chunk, or after some of them. Of a whole answer it leaves while it is computed."""
        if r.random() < 0.3:
            patience = r.uniform(0.0, 0.2)
            try:
                async with asyncio.timeout(patience):
                    await self.whole(question.body)
            except TimeoutError:
                return "while it was computed"
            return "too late"
        chunks = r.randint(0, 20)
        text = await self.streamed(question.body, most=chunks)
        self._compare(question, text, question.text.startswith(text))
        return "in the middle"

    async def dawdle(self, question: Question, r: Random) -> str:
        text, end = "", "to the end"
        try:
            body = {**question.body, "stream": True}
            # A small buffer, or aiohttp reads on while this one sleeps, and the server notices nothing.
            async with self._session.post(self._target.path(), json=body, read_bufsize=SLOW_BUFFER) as response:
                async for event in read_events(response):
                    text += "".join(choice.text or "" for choice in event.choices)
                    await asyncio.sleep(r.uniform(0.0, 0.1))
        except AnswerError as error:
            if str(error) != "error in the stream":
                raise
            end = "given up"
        whole = text == question.text if end == "to the end" else question.text.startswith(text)
        self._compare(question, text, whole)
        return end

    async def nonsense(self, question: Question, r: Random) -> str:
        body = {**question.body, **r.choice(NONSENSE)}
        async with self._post(body) as response:
            answer = await response.json(content_type=None)
            if not 400 <= response.status < 500 or "message" not in answer.get("error", {}):
                self.wrong.append(f"nonsense {body}: status {response.status}, {str(answer)[:200]}")
            return f"http {response.status}"

    async def whole(self, body: dict[str, Any]) -> str:
        async with self._post(body) as response:
            if response.status != 200:
                raise AnswerError(f"http {response.status}")
            answer = await response.json()
            return str(answer["choices"][0]["text"])

    async def streamed(self, body: dict[str, Any], most: int | None = None) -> str:
        """The text of a stream, or of its first events; then the connection is dropped."""
        text = ""
        async with self._post({**body, "stream": True}) as response:
            count = 0
            async for event in read_events(response):
                if count == most:
                    response.close()
                    break
                text += "".join(choice.text or "" for choice in event.choices)
                count += 1
        return text

    def _post(self, body: dict[str, Any]) -> Any:
        return self._session.post(self._target.path(), json=body)

    def _compare(self, question: Question, text: str, right: bool) -> None:
        if not right:
            asked = msgspec.json.encode(question.body).decode()[:200]
            self.wrong.append(f"{asked}: alone {question.text[:80]!r}, now {text[:80]!r}")


def bodies(model: str, seed: int) -> list[dict[str, Any]]:
    """Seeded requests of many kinds, some greedy, some with a beginning in common."""
    r = Random(seed)
    shared = [r.randint(0, LARGEST_ID) for _ in range(64)]
    return [
        {
            "model": model,
            "prompt": shared[: r.choice((0, 40, 64))] + [r.randint(0, LARGEST_ID) for _ in range(r.randint(1, 120))],
            "max_tokens": r.randint(1, 96),
            "temperature": r.choice((0.0, 0.7, 1.0)),
            "top_p": r.choice((0.9, 1.0)),
            "seed": r.randint(0, 1 << 31),
        }
        for _ in range(QUESTIONS)
    ]


def run_soak(settings: SoakSettings, say: Callable[[str], None]) -> SoakRecord:
    """Start a server unless there is one, let the clients loose, and judge.

    Raises:
        LabkitError: the server cannot be started.
    """
    machine = describe_machine()
    engine = settings.engine if settings.url is not None else POOL | settings.engine
    with ExitStack() as until_done:
        if settings.url is not None:
            target = Target(settings.url.rstrip("/"), settings.model, settings.key)
            server = Remote("server", f"at {target.url}", target)
        else:
            say(f"starting labkit serve with {settings.model}")
            server = _start(settings, engine)
            until_done.callback(server.close)
        watch = Watch(server)
        crowd = asyncio.run(_let_loose(settings, server.target, watch, say))
    answers = Check(
        "every answer is what its request gives alone, and nonsense is refused",
        passed=not crowd.wrong,
        found=f"{sum(crowd.outcomes.values())} requests, {len(crowd.wrong)} wrong",
    )
    return SoakRecord(
        schema=SCHEMA,
        kind="soak",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=list(settings.command),
        machine=machine,
        model=Path(settings.model).name,
        device=str(backend.resolve_device(engine.get("device", "auto"))),
        engine_options=engine,
        clients=settings.clients,
        seconds=settings.seconds,
        seed=settings.seed,
        outcomes=dict(sorted(crowd.outcomes.items())),
        wrong=crowd.wrong[:SHOWN],
        samples=watch.samples,
        checks=[answers, *judge(watch)],
    )


def _start(settings: SoakSettings, engine: dict[str, Any]) -> Server:
    checkpoint = open_checkpoint(settings.model)
    place = Place(
        model=settings.model,
        name=Path(checkpoint.name).name,
        dtype=engine.get("dtype", "auto"),
        max_num_seqs=min(settings.clients, 256),
        max_model_len=min(MODEL_LENGTH, checkpoint.config.max_position_embeddings),
        memory_share=0.9,
        prefix_caching=True,
        key=settings.key,
        api="completions",
    )
    return start_ours(place, engine)


async def _let_loose(settings: SoakSettings, target: Target, watch: Watch, say: Callable[[str], None]) -> Crowd:
    async with open_session(target) as session:
        alone = Crowd(session, target, [])
        say(f"{QUESTIONS} requests alone")
        questions = [Question(body, await alone.streamed(body)) for body in bodies(target.model, settings.seed)]
    await watch.idle(SECONDS_TO_IDLE)
    async with open_session(target) as session:
        crowd = Crowd(session, target, questions)
        until = time.monotonic() + settings.seconds
        watching = asyncio.create_task(watch.run(tqdm(total=round(settings.seconds), unit="s", desc="soak")))
        async with asyncio.TaskGroup() as group:
            for number in range(settings.clients):
                group.create_task(crowd.client(Random(f"{settings.seed} {number}"), until))
        watching.cancel()
    await watch.idle(SECONDS_TO_IDLE)
    return crowd
