"""Latencies of the last seconds, as percentiles of what was measured: no buckets, no averages of averages."""

from __future__ import annotations

import collections
from dataclasses import dataclass

WINDOW_SECONDS = 10.0
MOST_VALUES = 4096  # at more in a window, the last ones count


@dataclass(frozen=True)
class Percentiles:
    """Seconds, and how many values they are made of."""

    p50: float
    p95: float
    count: int


class Recent:
    """Values with their times; those older than a window are forgotten."""

    def __init__(self) -> None:
        self._values: collections.deque[tuple[float, float]] = collections.deque(maxlen=MOST_VALUES)

    def add(self, now: float, value: float) -> None:
        self._values.append((now, value))

    def percentiles(self, now: float) -> Percentiles | None:
        """Of the last WINDOW_SECONDS; None when there was nothing. Each is one of the values, none in between."""
        while self._values and self._values[0][0] < now - WINDOW_SECONDS:
            self._values.popleft()
        values = sorted(value for _, value in self._values)
        if not values:
            return None
        p50, p95 = (values[-(-len(values) * percent // 100) - 1] for percent in (50, 95))
        return Percentiles(p50, p95, len(values))
