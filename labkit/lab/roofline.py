"""The learner's measurements, kept for the whole series: two limits for each machine, and a point for each thing timed.

They lie in one small JSON file, `lab/roofline.json` in labkit's cache folder (LABKIT_CACHE).
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from labkit.lab.machine import Machine

VERSION = 1


@dataclass(frozen=True)
class Point:
    """One thing that was timed."""

    lesson: str
    name: str
    flops: float
    bytes: float
    seconds: float
    day: str

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def flop_rate(self) -> float:
        return self.flops / self.seconds


class Roofline:
    """What this machine can do at most, and what the learner saw it do. Saved at every change."""

    def __init__(self, path: Path, machine: Machine, lesson: str):
        self.path = path
        self.machine = machine
        self.lesson = lesson
        self.bandwidth: float | None = None  # bytes a second
        self.peak: float | None = None  # FLOPs a second
        self.points: list[Point] = []
        self._load()

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which reading and arithmetic take equally long.

        Raises:
            ValueError: before the two limits were measured.
        """
        bandwidth, peak = self.limits()
        return peak / bandwidth

    def limits(self) -> tuple[float, float]:
        """(bytes a second, FLOPs a second).

        Raises:
            ValueError: before they were measured.
        """
        if self.bandwidth is None or self.peak is None:
            raise ValueError("this machine's limits are not measured yet; lesson 00 does it, with set_limits")
        return self.bandwidth, self.peak

    def set_limits(self, bandwidth: float, peak: float) -> None:
        """Bytes a second and FLOPs a second, as measured here."""
        self.bandwidth, self.peak = float(bandwidth), float(peak)
        self._save()

    def add(self, name: str, *, flops: float, bytes: float, seconds: float) -> Point:
        """Keep a measurement. One of the same lesson and name is replaced, so that running a cell twice is harmless."""
        point = Point(self.lesson, name, float(flops), float(bytes), float(seconds), date.today().isoformat())
        self.points = [p for p in self.points if (p.lesson, p.name) != (point.lesson, name)] + [point]
        self._save()
        return point

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return data.get("machines", {}) if isinstance(data, dict) and data.get("version") == VERSION else {}

    def _load(self) -> None:
        mine = self._read().get(self.machine.key, {})
        try:
            self.points = [Point(**point) for point in mine.get("points", [])]
            self.bandwidth, self.peak = mine.get("bandwidth"), mine.get("peak")
        except (TypeError, AttributeError):  # someone edited the file: begin anew rather than fail a lesson
            self.points, self.bandwidth, self.peak = [], None, None

    def _save(self) -> None:
        machines = self._read()
        machines[self.machine.key] = {
            "bandwidth": self.bandwidth,
            "peak": self.peak,
            "points": [asdict(point) for point in self.points],
        }
        text = json.dumps({"version": VERSION, "machines": machines}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Two notebooks may save at once: each writes a file of its own and puts it in place whole.
            handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".json")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self.path)
        except OSError as error:
            print(f"your points are not kept for the next lesson: {error}")
