"""`lab.bench`: how long does this take here, and what does that say of bandwidth and arithmetic?"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

WARM_UP = 2
FEWEST, MOST = 5, 200


@dataclass(frozen=True)
class Timing:
    """One thing, timed. `seconds` is the median of `runs`, or None where it was not measured."""

    label: str
    seconds: float | None
    fastest: float | None = None
    slowest: float | None = None
    runs: int = 0
    bytes: float | None = None  # that it must move
    flops: float | None = None  # that it must do
    reason: str = ""  # why it was not measured

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return self.bytes / self.seconds if self.bytes is not None and self.seconds else None

    @property
    def flop_rate(self) -> float | None:
        """FLOPs a second."""
        return self.flops / self.seconds if self.flops is not None and self.seconds else None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.label:<34} not measured on this machine: {self.reason}"
        parts = [f"{self.label:<34} {milliseconds(self.seconds):>10}"]
        if self.bandwidth is not None:
            parts.append(f"{self.bandwidth / 1e9:8.1f} GB/s")
        if self.flop_rate is not None:
            parts.append(f"{self.flop_rate / 1e9:8.1f} GFLOP/s")
        spread = f"{milliseconds(self.fastest or 0)} to {milliseconds(self.slowest or 0)}"
        return "  ".join(parts) + f"   (median of {self.runs}, {spread})"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds * 1e3:,.0f} ms"


def _interpreter() -> tuple[type, str] | None:
    """Class and method that run Triton kernels in Python in this process; None where nothing does."""
    from labkit.lab import programs

    if isinstance(programs.triton, programs.StandIn):
        return programs.Kernel, "run"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from triton.runtime.interpreter import GridExecutor

    return GridExecutor, "__call__"


@contextmanager
def watch_interpreter() -> Iterator[list[bool]]:
    """A list that is no longer empty once a Triton kernel ran in the interpreter."""
    seen: list[bool] = []
    interpreter = _interpreter()
    if interpreter is None:
        yield seen
        return
    original = getattr(*interpreter)

    def noticed(*args: Any, **kwargs: Any) -> Any:
        seen.append(True)
        return original(*args, **kwargs)

    setattr(*interpreter, noticed)
    try:
        yield seen
    finally:
        setattr(*interpreter, original)


def _once(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        fn(*arguments)
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    fn(*arguments)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def bench(
    fn: Callable[..., Any],
    *,
    label: str = "",
    bytes: float | None = None,
    flops: float | None = None,
    fresh: Callable[[], tuple[Any, ...]] | None = None,
    budget: float = 0.5,
) -> Timing:
    """Time `fn` after a warm-up, print the result and return it.

    Args:
        bytes: what one call must read and write; gives GB/s.
        flops: what one call must compute; gives GFLOP/s.
        fresh: makes the arguments of each call anew, outside the timing.
        budget: seconds to spend; at least 5 calls are made whatever they take.

    A kernel in Triton's interpreter is not timed: its time says nothing of the kernel.
    """
    label = label or getattr(fn, "__name__", "function")
    arguments = fresh or tuple
    with watch_interpreter() as interpreted:
        fn(*arguments())
    if interpreted:
        reason = "Triton's interpreter runs the kernel in Python; its time says nothing of the kernel"
        timing = Timing(label, None, bytes=bytes, flops=flops, reason=reason)
        print(timing)
        return timing
    for _ in range(WARM_UP - 1):
        fn(*arguments())
    times: list[float] = []
    until = time.perf_counter() + budget
    while len(times) < FEWEST or (time.perf_counter() < until and len(times) < MOST):
        times.append(_once(fn, arguments()))
    timing = Timing(label, statistics.median(times), min(times), max(times), len(times), bytes, flops)
    print(timing)
    return timing
