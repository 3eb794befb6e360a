"""Where a lesson's function can stand in for the engine's. The engine knows nothing of it.

A seam is a name for an ordinary module attribute. While a swap lasts, the attribute is the learner's function.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SEAMS = {
    "greedy": "labkit.kernels.sampling:greedy",  # logits [S, V] -> ids [S]
    "sample": "labkit.kernels.sampling:sample",
    "rms_norm": "labkit.kernels.rms_norm:rms_norm",  # x [..., E], weight [E], eps -> [..., E]
    "add_rms_norm": "labkit.kernels.rms_norm:add_rms_norm",  # x [T, E], residual [T, E], weight [E], eps -> two [T, E]
    "rope": "labkit.kernels.rope:apply_rope",
    "attention": "labkit.kernels.attention:attention",
    "silu_mul": "labkit.kernels.activation:silu_mul",
}


@dataclass
class Swap:
    """What came of a swap."""

    seam: str
    calls: int = 0


@contextmanager
def swap(seam: str, fn: Callable[..., Any]) -> Iterator[Swap]:
    """Run the engine with `fn` in place of its own function, until the block ends, however it ends.

    Raises:
        KeyError: no such seam; names those that there are.
        TypeError: `fn` cannot be called.
    """
    if seam not in SEAMS:
        raise KeyError(f"there is no seam {seam!r}; there are {', '.join(SEAMS)}")
    if not callable(fn):
        raise TypeError(f"a function is needed for the seam {seam!r}, not {type(fn).__name__}")
    module_name, attribute = SEAMS[seam].split(":")
    module = importlib.import_module(module_name)
    original = getattr(module, attribute)
    result = Swap(seam)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result.calls += 1
        return fn(*args, **kwargs)

    setattr(module, attribute, counted)
    try:
        yield result
    finally:
        setattr(module, attribute, original)


def original(seam: str) -> Callable[..., Any]:
    """The engine's own function behind a seam."""
    module_name, attribute = SEAMS[seam].split(":")
    return getattr(importlib.import_module(module_name), attribute)
