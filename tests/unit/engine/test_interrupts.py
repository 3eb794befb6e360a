"""Signals wait for `check`, or for the end of the block, and their handlers come back."""

import os
import signal
import threading

import pytest

from labkit.engine.interrupts import interrupts_between_steps

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals here")


class Rung(Exception):
    """What the handlers of these tests raise."""


def ring(signum, frame):
    raise Rung(signum)


@pytest.fixture(autouse=True)
def handlers():
    before = {number: signal.signal(number, ring) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    assert {signal.getsignal(number) for number in before} == {ring}
    for number, handler in before.items():
        signal.signal(number, handler)


def press(number=signal.SIGUSR1):
    os.kill(os.getpid(), number)
    for _ in range(1000):  # where Python would run the handler
        pass


def test_a_handler_waits_for_check():
    with interrupts_between_steps() as check:
        check()
        press()
        with pytest.raises(Rung):
            check()
        check()


def test_a_handler_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(Rung), interrupts_between_steps():
        press()
        done.append("all of it")
    assert done


def test_nothing_is_lost_when_the_block_fails():
    with pytest.raises(Rung) as caught, interrupts_between_steps():
        press()
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_two_signals_raise_one_after_the_other():
    with interrupts_between_steps() as check:
        press()
        press(signal.SIGUSR2)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            with pytest.raises(Rung, match=str(int(number))):
                check()


def test_other_threads_have_no_signals():
    seen = []

    def work():
        with interrupts_between_steps() as check:
            check()
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [ring]
