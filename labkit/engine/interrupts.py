"""Signals that come in the middle of a step, and wait for its end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Ctrl-C, a request to end, time limits. Not all there are: a microsecond each is spent on them in every step.
NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2")
WAITING = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """The handlers of signals, which may raise anything, wait for a moment when the books are whole.

    Yields a function that runs the handlers of those signals that have come; the end of the block does so too.
    Signals without a handler in Python do what they always do.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main one only
        yield lambda: None
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[..., Any]] = {}
    waiting = True

    def note(signum: int, frame: FrameType | None) -> None:
        if waiting:
            came.append((signum, frame))
        else:
            handlers[signum](signum, frame)

    def check() -> None:
        while came:
            signum, frame = came.pop(0)
            handlers[signum](signum, frame)

    def restore(numbers: list[int]) -> None:
        """A handler that is back may raise at once; the others must come back all the same."""
        if numbers:
            try:
                signal.signal(numbers[0], handlers[numbers[0]])
            finally:
                restore(numbers[1:])

    try:
        for number in WAITING:
            handler = signal.getsignal(number)
            if callable(handler):  # not SIG_DFL or SIG_IGN, which are numbers, nor None: not Python's
                handlers[number] = handler
                signal.signal(number, note)
        yield check
    finally:
        try:
            restore(list(handlers))
        finally:
            waiting = False
            check()
