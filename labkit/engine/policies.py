"""Who comes first. A policy is a sort key: the smallest is admitted first and preempted last."""

from __future__ import annotations

from typing import Protocol

from labkit.engine.request import Sequence


class Policy(Protocol):
    @staticmethod
    def key(seq: Sequence) -> tuple[int, ...]:
        """A key no other sequence has, so that the order is total. It may not change while the sequence lives."""


class Fcfs:
    """First come, first served."""

    @staticmethod
    def key(seq: Sequence) -> tuple[int, ...]:
        return (seq.number, seq.index)


class Priority:
    """The lowest `SamplingParams.priority` first, then by arrival."""

    @staticmethod
    def key(seq: Sequence) -> tuple[int, ...]:
        return (seq.params.priority, seq.number, seq.index)


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs, "priority": Priority}
