"""`lab`: everything a lesson's cells call, in one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.lab import bench as benches
from labkit.lab import check as checks
from labkit.lab import online, programs, seams
from labkit.lab import predict as predictions
from labkit.lab import recorded as records
from labkit.lab import show as pictures
from labkit.lab import traffic as traffics
from labkit.lab.exercises import find_exercise
from labkit.lab.exercises.exercise import Verdict
from labkit.lab.machine import Machine
from labkit.lab.plain import PlainModel
from labkit.lab.roofline import Roofline
from labkit.lab.source import Source
from labkit.models.sources import known_models
from labkit.paths import cache_folder

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from labkit.bench.table import AnyRecord
    from labkit.lab.widgets.roofline import Setting
    from labkit.lab.widgets.stepper import Stepper
    from labkit.llm import LLM

REAL = "smollm2-135m"


class Lab:
    """The helper of one lesson, as `setup` gives it."""

    def __init__(self, number: str, machine: Machine):
        self.number = number
        self.machine = machine

    def model(self) -> str:
        """The model this lesson runs on: smollm2-135m where it is at hand, otherwise toy. Says which."""
        at_hand = any(model.name == REAL and model.path is not None for model in known_models())
        if at_hand:
            print(f"model: {REAL}")
            return REAL
        print(
            f"model: toy. For a real one, run `labkit models pull {REAL}` in a terminal (about 100 MB), then restart."
        )
        return "toy"

    def plain(self, llm: LLM) -> PlainModel:
        """The same weights as the engine's, in the plainest model that can run them."""
        decoder = llm.engine.runner.model
        return PlainModel(decoder.config, decoder.weights)

    @cached_property
    def roofline(self) -> Roofline:
        """The learner's measurements, kept for the whole series."""
        folder = os.environ.get("LABKIT_LAB_FOLDER")
        return Roofline(Path(folder or cache_folder() / "lab") / "roofline.json", self.machine, self.number)

    def roofline_widget(self, settings: Sequence[Setting], start: int = 0) -> Stepper:
        """The roofline with a slider over what could be run; see widgets/roofline.py."""
        from labkit.lab.widgets.roofline import widget

        return widget(self.roofline, list(settings), start)

    def trace(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> programs.Trace:
        """Run a Triton kernel program by program on CPU tensors and note each load and store; see programs.py."""
        return programs.trace(kernel, grid, *arguments, **options)

    def programs_widget(self, trace: programs.Trace, start: int = 0) -> Stepper:
        """A slider over the loads and stores of a trace; see widgets/programs.py."""
        from labkit.lab.widgets.programs import widget

        return widget(trace, start)

    def attend_in_steps(
        self, take_tile: online.TakeTile, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: int
    ) -> online.Online:
        """Run a step of online softmax over all tiles of keys and keep what is known after each; see online.py."""
        return online.attend_in_steps(take_tile, q, k, v, tile)

    def online_widget(self, steps: online.Online, start: int = 0) -> Stepper:
        """A slider over the tiles of attention; see widgets/online.py."""
        from labkit.lab.widgets.online import widget

        return widget(steps, start)

    def traffic(self, fn: Callable[..., Any], *arguments: Any) -> list[traffics.Operation]:
        """The operations that PyTorch runs for `fn(*arguments)`, with the bytes that each reads and writes."""
        return traffics.traffic(fn, *arguments)

    def peak(self, fn: Callable[..., Any], *arguments: Any) -> int:
        """The most bytes of results that `fn(*arguments)` has in memory at once."""
        return traffics.peak(fn, *arguments)

    def recorded(self, name: str) -> AnyRecord:
        """The newest record of that name in data/recorded/. Says on which machine and day it was made."""
        return records.recorded(name)

    def check(self, id: str, fn: Callable[..., Any]) -> Verdict:
        """⏳ not tried, ❌ with the smallest case that fails, ✅."""
        return checks.check(id, fn)

    def solved(self, id: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The learner's function if it passes its check, otherwise the solution's, so that the lesson can go on."""
        if checks.check(id, fn).passed:
            print(f"{id}: with your function")
            return fn
        exercise = find_exercise(id)
        print(f"{id}: yours does not pass yet, so with the solution's {exercise.name}")
        return exercise.define(exercise.solution)

    def predict(self, what: str, guess: float, unit: str = "") -> predictions.Prediction:
        """Keep a guess; `.compare(measured)` says later how good it was."""
        return predictions.predict(what, guess, unit)

    def bench(self, fn: Callable[..., Any], **options: Any) -> benches.Timing:
        """Time `fn`; see labkit/lab/bench.py."""
        return benches.bench(fn, **options)

    def show(self, fig: Figure, alt: str) -> pictures.Picture:
        """A matplotlib figure with words for those who cannot see it."""
        return pictures.show(fig, alt)

    def style(self) -> dict[Any, Any]:
        """matplotlib settings for `matplotlib.rc_context`."""
        return pictures.style()

    def source(self, obj: Any, folded: bool = False) -> Source:
        """The engine's code of a function, class or module, or "rms_norm.cpp:normalise" of csrc/, with its place."""
        return Source(obj, folded)

    def swap(self, seam: str, fn: Callable[..., Any]) -> AbstractContextManager[seams.Swap]:
        """The engine with `fn` in place of its own, while the `with` block lasts."""
        return seams.swap(seam, fn)
