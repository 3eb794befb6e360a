"""How often an engine that ends by itself is started again."""

from __future__ import annotations

MOST = 3
WITHIN = 600.0  # seconds
FIRST_PAUSE = 1.0  # seconds; each further one is four times as long


class Restarts:
    """At most MOST starts in any WITHIN seconds, each after a longer pause: a fault that stays must end some time."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def pause(self, now: float) -> float | None:
        """Count one more start: the seconds to wait before it, or None when there have been too many."""
        self._times = [time for time in self._times if now - time < WITHIN]
        if len(self._times) >= MOST:
            return None
        self._times.append(now)
        return FIRST_PAUSE * 4 ** (len(self._times) - 1)
