"""Stories, written by the teacher through labkit's engine: it is led from beat to beat and adds a sentence or two.

The engine is driven step by step (`LLM.engine`) rather than call by call: as soon as a story's sentence is there its
next one is asked for, so the batch is full all the time, and text is made of tokens only where it is looked at.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from labkit import LLM, SamplingParams
from labkit.engine.request import EngineRequest
from toy_maker import sentences
from toy_maker.files import atomically, read_lines, write_lines
from toy_maker.prompts import SEED, Plan, draw_plan
from toy_maker.settings import OutOfTime, Settings

SYSTEM = "You tell stories to small children. You use easy words and short sentences."
REQUEST = "Tell me a short, simple story about {}."
TRIES = 2
TO_FINISH = 20  # seconds for the stories that are open when the time is over
BYTES_A_TOKEN = 4.2  # of the toy's tokenizer on these stories, for the estimate of how many there are
SAMPLING: dict[str, Any] = {"temperature": 0.75, "min_p": 0.12, "detokenize": False}


class Draft:
    """A story in the making: the text so far, as the teacher's tokens too."""

    def __init__(self, plan: Plan, tokenizer: Any):
        self.plan = plan
        self.text = ""
        self.parts = 0  # sentences of the teacher's
        self._tokenizer = tokenizer
        self._rng = random.Random(f"{SEED}/parts/{plan.number}")
        self._wanted = 1
        self._beat = 0
        self._tries = 0
        # Of the plot the opening knows nothing yet, or it would tell it all at once.
        self._ids = self._asked(f"{plan.who} named {plan.name}")
        self._ends = tuple(tokenizer.encode(end, add_special_tokens=False)[0] for end in ".!?")
        self._enter()

    @property
    def is_done(self) -> bool:
        return self._beat == len(self.plan.beats)

    def request(self) -> EngineRequest:
        """What the teacher is asked next."""
        opener = self._tokenizer.encode(" " + self.plan.beats[self._beat].opener, add_special_tokens=False)
        seed = random.Random(f"{self.plan.number}/{self._beat}/{self._tries}").getrandbits(60)
        # A full stop mostly ends the one sentence that is wanted; inside quotes it does not, so the second try goes on.
        one = self._wanted == 1 and self._tries == 0 and '"' not in self.plan.beats[self._beat].opener
        params = SamplingParams(
            **SAMPLING, seed=seed, max_tokens=28 if one else 40, stop_token_ids=self._ends if one else None
        )
        return EngineRequest(str(self.plan.number), self._ids + opener, params)

    def take(self, token_ids: list[int]) -> None:
        """What it answered: its first good sentences are kept, then the next beat begins."""
        opener = self.plan.beats[self._beat].opener
        told = sentences.normalise(opener + self._tokenizer.decode(token_ids)).split("\n")[0]
        kept = []
        for sentence in sentences.split(told)[: self._wanted]:
            if not sentences.is_good(sentence, self.plan.allowed_names(), self.plan.wrong_words, self.text):
                break
            kept.append(sentence)
        self._tries += 1
        if not kept and self._tries < TRIES:
            return
        self._say(" ".join(kept))
        self.parts += len(kept)
        if self._beat == 0:
            self._ids = self._asked(self.plan.subject) + self._tokenizer.encode(self.text, add_special_tokens=False)
        self._beat += 1
        self._enter()

    def _asked(self, subject: str) -> list[int]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": REQUEST.format(subject)}]
        ids: list[int] = self._tokenizer.apply_chat_template(messages)
        return ids

    def _enter(self) -> None:
        """Write the beats up to the next one with words for the teacher to go on with."""
        while not self.is_done:
            self._say(self.plan.beats[self._beat].text)
            if self.plan.beats[self._beat].opener:
                self._tries, self._wanted = 0, 1 + (self._rng.random() < 0.15)
                return
            self._beat += 1

    def _say(self, text: str) -> None:
        if text:
            piece = " " + text if self.text else text
            self.text += piece
            self._ids = self._ids + self._tokenizer.encode(piece, add_special_tokens=False)


class Writer:
    """One process: an engine and the stories number first, first + step, …"""

    def __init__(self, settings: Settings, index: int):
        self.settings = settings
        self.index = index
        self.folder = settings.folder("stories")
        fields: dict[str, Any] = {"max_num_batched_tokens": 8192, "num_kv_blocks": 40_000, "dtype": settings.dtype}
        if settings.device == "cpu":
            fields = {"num_kv_blocks": 2000}
        self.llm = LLM(
            settings.teacher,
            device=settings.device,
            max_model_len=768,
            max_num_seqs=settings.writer_seqs,
            quiet=True,
            **fields,
        )
        self._next = self._first_unwritten()
        self._open: dict[str, Draft] = {}
        self._tokens: dict[str, list[int]] = {}
        self._finished: list[dict[str, Any]] = []

    def _first_unwritten(self) -> int:
        done = [int(path.name.split("-")[2].split(".")[0]) for path in self.folder.glob(f"shard-{self.index}-*.gz")]
        return max(done) + self.settings.writers if done else self.index

    def write(self, seconds: float, limit: int, bar: tqdm | None) -> None:
        """Stories for `seconds`, or until `limit` tokens are there; those begun are finished."""
        # To load and to compile takes its time, too, and what was begun is still to be finished.
        end = min(time.monotonic() + seconds, self.settings.deadline - TO_FINISH)
        characters = 0
        while True:
            going = time.monotonic() < end and characters / BYTES_A_TOKEN < limit
            while going and len(self._open) < self.settings.writer_seqs * 5 // 4:
                self._begin()
            if not self._open:
                break
            for done in self._step():
                characters += len(done["story"]) if done["parts"] >= self.settings.least_parts else 0
                self._finished.append(done)
                if bar is not None:
                    bar.update()
            if len(self._finished) >= self.settings.shard_stories:
                self._flush()
        self._flush()

    def _begin(self) -> None:
        draft = Draft(draw_plan(self._next), self.llm.tokenizer)
        self._next += self.settings.writers
        self._ask(draft)

    def _ask(self, draft: Draft) -> None:
        request = draft.request()
        self._open[request.request_id] = draft
        self._tokens[request.request_id] = []
        self.llm.engine.add_request(request)

    def _step(self) -> list[dict[str, Any]]:
        """One step of the engine; returns the stories that it ended."""
        ended = []
        for delta in self.llm.engine.step().deltas:
            if delta.error:
                raise RuntimeError(delta.error)
            self._tokens[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is None:
                continue
            draft = self._open.pop(delta.request_id)
            draft.take(self._tokens.pop(delta.request_id))
            if draft.is_done:
                plan = draft.plan
                record = {"number": plan.number, "plot": plan.plot, "name": plan.name, "ask": plan.ask}
                ended.append(record | {"subject": plan.subject, "parts": draft.parts, "story": draft.text})
            else:
                self._ask(draft)
        return ended

    def _flush(self) -> None:
        if self._finished:
            # The number up to which all were begun: nothing before it is open when the time is over.
            highest = self._next - self.settings.writers
            write_lines(self.folder / f"shard-{self.index}-{highest}.jsonl.gz", self._finished)
            self._finished = []


def _work(settings: Settings, index: int, seconds: float, limit: int) -> None:
    bar = tqdm(desc="stories", unit=" stories", disable=index > 0, mininterval=5, dynamic_ncols=True)
    with bar:
        writer = Writer(settings, index)
        try:
            writer.write(seconds, limit, bar)
        finally:
            writer.llm.close()


def write_stories(settings: Settings) -> None:
    """The stage: shards of stories, until there are enough or the time for them is used up.

    Raises:
        OutOfTime: the call's limit came first.
    """
    done = settings.folder("stories") / "done"
    if done.exists():
        return
    seconds = min(settings.story_seconds, settings.seconds_left() - TO_FINISH)
    tokens = story_tokens(settings)
    if seconds < 5:
        raise OutOfTime
    limit = max(0, settings.story_tokens - tokens) // settings.writers
    if settings.writers == 1:
        _work(settings, 0, seconds, limit)
    else:
        _run_processes(settings, seconds, limit)
    print(f"stories: about {story_tokens(settings) / 1e6:.2f} million tokens")
    if seconds < settings.story_seconds and story_tokens(settings) < settings.story_tokens:
        raise OutOfTime
    atomically(done, lambda part: part.touch())


def _run_processes(settings: Settings, seconds: float, limit: int) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(settings, i, seconds, limit)) for i in range(settings.writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    failed = [i for i, process in enumerate(processes) if process.exitcode]
    if failed:
        raise RuntimeError(f"writer {failed[0]} failed; what it said stands above")


def shards(settings: Settings) -> list[Path]:
    return sorted(settings.folder("stories").glob("shard-*.jsonl.gz"))


def story_tokens(settings: Settings) -> int:
    """About how many tokens of stories there are that may be kept."""
    least = settings.least_parts
    records = (record for path in shards(settings) for record in read_lines(path))
    return int(sum(len(record["story"]) for record in records if record["parts"] >= least) / BYTES_A_TOKEN)
