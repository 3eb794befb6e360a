"""What a run of the maker is told, and the sizes of its stages."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path

from toy_maker.files import read_json, write_json


@dataclass(frozen=True)
class Settings:
    """Times are seconds, sizes are tokens unless they say otherwise."""

    work: Path
    out: Path  # where the folders toy and toy-draft go
    device: str = "cuda"
    teacher: str = "smollm2-135m"
    story_tokens: int = 34_000_000  # of kept stories, by the writers' own estimate
    story_seconds: float = 330
    writers: int = 4  # processes, each with an engine: one alone is held up by Python
    writer_seqs: int = 512
    shard_stories: int = 2000
    least_parts: int = 3  # sentences of the teacher's in a story that is kept
    held_out_stories: int = 4000
    held_out_bytes: int = 200_000  # of those, kept in data/toy
    vocab_size: int = 4000
    context: int = 1024
    batch: int = 128
    target_seconds: float = 300
    target_steps: int | None = None  # None: as many as target_seconds hold
    draft_seconds: float = 100
    draft_steps: int | None = None
    draft_prompts: int = 14_000
    longest: int = 400  # of an answer that is drawn from the models
    eval_stories: int = 400
    eval_samples: int = 100
    eval_prompts: int = 200
    ngram_tokens: int = 12_000_000
    checkpoint_seconds: float = 60
    commit: str | None = None  # of the checkout, where git cannot tell
    deadline: float = field(default_factory=lambda: float("inf"))  # of time.monotonic()

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    def folder(self, name: str) -> Path:
        """A folder under `work`, made if it is not there."""
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


def check_same_run(settings: Settings) -> None:
    """What lies in `work` was made by the same teacher, and not by a smoke run if this is none.

    Raises:
        RuntimeError: it was not.
    """
    path = settings.folder(".") / "run.json"
    run = {"teacher": settings.teacher, "vocab_size": settings.vocab_size, "story_tokens": settings.story_tokens}
    if not path.exists():
        write_json(path, run)
    if read_json(path) != run:
        raise RuntimeError(
            f"{settings.work} holds another run's stages ({read_json(path)}, this one is {run}); "
            "give another --work, or remove it"
        )


def smoke(settings: Settings) -> Settings:
    """All stages tiny, on a CPU, with toy as teacher: it shows that they work, the models are no good."""
    return dataclasses.replace(
        settings,
        device="cpu",
        teacher="toy",
        story_tokens=2000,
        story_seconds=900,
        writers=1,
        writer_seqs=12,
        shard_stories=16,
        least_parts=0,
        held_out_stories=4,
        held_out_bytes=4000,
        vocab_size=600,
        context=512,
        batch=2,
        target_steps=6,
        draft_steps=4,
        draft_prompts=8,
        eval_stories=4,
        longest=24,
        eval_samples=4,
        eval_prompts=4,
        checkpoint_seconds=2,
    )


class OutOfTime(Exception):
    """The time limit came first; what was done is kept, and the same command goes on from there."""
