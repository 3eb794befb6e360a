"""Our own engine, seen from outside: what it gives back, its memory, and what a step costs besides the model."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from labkit.bench.record import OURS, Memory, StepCost
from labkit.bench.workloads import Answer, Workload
from labkit.config import EngineConfig, SamplingParams
from labkit.engine.trace import Trace
from labkit.llm import LLM
from labkit.models.weights import num_parameters

STEP_COST_WARM_UP = 8  # tokens out


class Labkit:
    """`LLM`, used as anybody would: all prompts in one call, in this thread."""

    def __init__(self, model: str, config: EngineConfig, trace: Trace | None, name: str = OURS):
        self.name = name
        before = resident_bytes()
        self.llm = LLM(model, trace=trace, quiet=True, **vars(config))
        after, peak = resident_bytes(), peak_resident_bytes()
        self.config = self.llm.engine.config
        self.dtype = self.config.dtype
        self.how = f"LLM.generate(), kernels {self.config.kernels}, {torch.get_num_threads()} threads"
        weights = num_parameters(self.llm.engine.model_config) * getattr(torch, self.dtype).itemsize
        self._memory = Memory(weights, self.llm.engine.stats().kv_bytes, before, after, peak, after)

    def run(self, workload: Workload) -> Answer:
        params = [
            SamplingParams(temperature=workload.temperature, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in workload.max_tokens
        ]
        begin = time.perf_counter()
        outputs = self.llm.generate(workload.prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        times = [output.metrics for output in outputs]
        start = min(t.arrival_time for t in times)
        return Answer(
            seconds,
            [list(output.outputs[0].token_ids) for output in outputs],
            [None if t.first_token_time is None else t.first_token_time - start for t in times],
            [None if t.finished_time is None else t.finished_time - start for t in times],
        )

    def memory(self) -> Memory:
        """As it was around loading, and as it is now."""
        m = self._memory
        return Memory(
            m.weights_bytes, m.kv_bytes, m.before_bytes, m.after_load_bytes, m.peak_load_bytes, resident_bytes()
        )

    def step_cost(self, workload: Workload) -> StepCost:
        """Where the time of a step goes while the real model runs this workload.

        The model's part is taken with a clock around its two calls, so this is for a CPU only: on a GPU they return
        before the work is done. The middle one of three runs, by what the model does not take.
        """
        self.run(workload.shortened(STEP_COST_WARM_UP))
        return sorted((self._clocked_run(workload) for _ in range(3)), key=lambda cost: cost.own_ms)[1]

    def _clocked_run(self, workload: Workload) -> StepCost:
        engine = self.llm.engine
        before = engine.stats()
        with clocked(engine.runner.model, ("forward", "logits")) as clock:
            answer = self.run(workload)
        after = engine.stats()
        steps = after.steps - before.steps
        in_steps = after.step_seconds - before.step_seconds
        in_scheduler = after.scheduler_seconds - before.scheduler_seconds
        in_model = clock["seconds"]
        parts = (
            answer.seconds,
            in_model,
            in_steps - in_scheduler - in_model,
            in_scheduler,
            answer.seconds - in_steps,
        )
        return StepCost(len(workload.prompts), steps, *(part / steps * 1e3 for part in parts))

    def close(self) -> None:
        self.llm.close()


@contextlib.contextmanager
def clocked(target: Any, methods: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Within it, the named methods of an object add the seconds they take to the dict's "seconds"."""
    clock = {"seconds": 0.0}

    def with_clock(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                clock["seconds"] += time.perf_counter() - begin

        return timed

    for name in methods:
        setattr(target, name, with_clock(getattr(target, name)))
    try:
        yield clock
    finally:
        for name in methods:
            delattr(target, name)  # the class's own is seen again


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, mapped files included."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most it has been so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
