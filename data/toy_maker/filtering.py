"""Which stories are kept: whole, simple, about their hero, and no two nearly the same.

First each story alone, in all cores; then all of them together, in the order of their numbers.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from toy_maker import sentences
from toy_maker.files import read_lines, write_json, write_lines, write_text
from toy_maker.settings import Settings
from toy_maker.stories import shards

LEAST_WORDS, MOST_WORDS = 50, 260
COMMON_WORDS = 6000  # the vocabulary: this many of the most frequent words
MOST_RARE = 0.02  # share of a story's words that may be others
SHINGLE = 6  # words
SAMPLED = 3
MOST_SHARED = 0.6  # share of a story's shingles that an earlier story may have had: what is ours in a plot comes again


def reason_against(record: dict[str, Any], least_parts: int) -> str | None:
    """Why a story is no good by itself; None if it is."""
    text = record["story"]
    spoken = sentences.words(text)
    if record["parts"] < least_parts:
        return "too little of the teacher's"
    if not LEAST_WORDS <= len(spoken) <= MOST_WORDS:
        return "length"
    if record["name"].lower() not in spoken:
        return "its hero is not in it"
    if text[-1] not in '.!?"' or text.count('"') % 2:
        return "not whole"
    told = sentences.split(text)
    if len(set(told)) < len(told):
        return "a sentence twice"
    return "loops" if _most_frequent(spoken, 4) > 3 else None


def _most_frequent(spoken: list[str], size: int) -> int:
    grams = collections.Counter(zip(*(spoken[i:] for i in range(size))))
    return max(grams.values(), default=0)


def _check_shard(
    job: tuple[Path, int],
) -> tuple[list[dict[str, Any]], collections.Counter[str], collections.Counter[str]]:
    path, least_parts = job
    kept, reasons, seen = [], collections.Counter[str](), collections.Counter[str]()
    for record in read_lines(path):
        reason = reason_against(record, least_parts)
        reasons[reason or "good"] += 1
        if reason is None:
            spoken = sentences.words(record["story"])
            kept.append(record | {"shingles": shingles(spoken)})
            seen.update(spoken)
    return kept, reasons, seen


def shingles(spoken: list[str]) -> set[int]:
    """Hashes of a SAMPLED-th of all runs of SHINGLE words, the same runs in every text."""
    hashes = np.array([zlib.crc32(word.encode()) for word in spoken], dtype=np.uint64)
    count = max(0, len(hashes) - SHINGLE + 1)
    runs = np.zeros(count, dtype=np.uint64)
    for i in range(SHINGLE):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + hashes[i : i + count]
    mixed = runs ^ (runs >> np.uint64(29))
    return set(mixed[mixed % np.uint64(SAMPLED) == 0].tolist())


class Seen:
    """Shingles of one plot's stories: a new one is a near duplicate if too many of its own were there in one story."""

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}  # the last story with that shingle

    def is_new(self, number: int, own: set[int]) -> bool:
        owners = collections.Counter(self._owner[one] for one in own if one in self._owner)
        if owners and owners.most_common(1)[0][1] > MOST_SHARED * len(own):
            return False
        self._owner.update(dict.fromkeys(own, number))
        return True


def _good_stories(settings: Settings) -> tuple[list[dict[str, Any]], collections.Counter[str]]:
    """Good by themselves and of common words, in the order of their numbers."""
    jobs = [(path, settings.least_parts) for path in shards(settings)]
    reasons, seen, kept = collections.Counter[str](), collections.Counter[str](), []
    with multiprocessing.Pool(min(16, os.cpu_count() or 1)) as pool:
        for good, why, words in tqdm(pool.imap_unordered(_check_shard, jobs), "filter", len(jobs), unit=" shards"):
            kept += good
            reasons += why
            seen += words
    common = {word for word, _ in seen.most_common(COMMON_WORDS)}
    simple = []
    for record in kept:
        spoken = sentences.words(record["story"])
        if sum(word not in common for word in spoken) <= MOST_RARE * len(spoken):
            simple.append(record)
    reasons["rare words"] = len(kept) - len(simple)
    simple.sort(key=lambda record: record["number"])
    return simple, reasons


def filter_stories(settings: Settings) -> None:
    """The stage: clean/train.jsonl.gz and clean/held_out.jsonl.gz; no request for a story is in both."""
    folder = settings.folder("clean")
    if (folder / "counts.json").exists():
        return
    simple, reasons = _good_stories(settings)
    seen = collections.defaultdict[str, Seen](Seen)
    stories = [one for one in simple if seen[one["plot"]].is_new(one["number"], one.pop("shingles"))]
    reasons["near duplicate"] = len(simple) - len(stories)
    if not stories:
        raise RuntimeError(f"no story was good enough: {dict(reasons)}")
    held_out, train = split(stories, settings.held_out_stories)
    reasons["good"] = len(train) + len(held_out)
    write_lines(folder / "train.jsonl.gz", train)
    write_lines(folder / "held_out.jsonl.gz", held_out)
    write_json(folder / "counts.json", dict(reasons))
    print(f"stories kept: {len(train)}, held out: {len(held_out)}; {dict(reasons)}")


def split(stories: list[dict[str, Any]], held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """About `held_out` stories whose requests nobody else has, spread over all; the rest."""
    asked = collections.Counter(_key(one["ask"]) for one in stories)
    alone = [one for one in stories if asked[_key(one["ask"])] == 1]
    taken = {one["number"] for one in alone[:: max(1, len(alone) // held_out)][:held_out]}
    return [one for one in stories if one["number"] in taken], [one for one in stories if one["number"] not in taken]


def _key(ask: str) -> str:
    return ask.lower().rstrip(".?!")


def write_sample(settings: Settings, folder: Path) -> None:
    """held_out.jsonl: the first held-out stories, as many as fit."""
    lines: list[str] = []
    size = 0
    for record in read_lines(settings.folder("clean") / "held_out.jsonl.gz"):
        line = json.dumps({"prompt": record["ask"], "story": record["story"]}) + "\n"
        size += len(line)
        if size > settings.held_out_bytes:
            break
        lines.append(line)
    write_text(folder / "held_out.jsonl", "".join(lines))


def training_stories(settings: Settings) -> Iterable[dict[str, Any]]:
    return read_lines(settings.folder("clean") / "train.jsonl.gz")


def held_out_stories(settings: Settings) -> Iterator[dict[str, Any]]:
    return read_lines(settings.folder("clean") / "held_out.jsonl.gz")
