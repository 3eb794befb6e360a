"""Ctrl-C and a closed pipe, on a real process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, str(Path(__file__).with_name("slow_labkit.py"))]


def start(*args: str, **streams: int) -> subprocess.Popen[bytes]:
    # A shell's background job ignores SIGINT, and its children would inherit that.
    interrupted = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen([*COMMAND, *args], preexec_fn=interrupted, env=buffered, **streams)


class Terminal:
    """A pseudo-terminal whose other end is the command's stdin, stdout and stderr."""

    def __init__(self, *args: str):
        self.end, other = os.openpty()
        self.process = start(*args, stdin=other, stdout=other, stderr=other)
        os.close(other)
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Read on until `text` has come; what was shown up to there is done with."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} in {self.shown!r}"
            self.shown += os.read(self.end, 4096).decode()
        assert "Traceback" not in self.shown
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def ctrl_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def ctrl_c_at_the_prompt(self) -> int:
        """The exit status after Ctrl-C, pressed again if nothing happens.

        readline shows its prompt a moment before it waits for a key, and a signal in between wakes nobody up.
        """
        for _ in range(3):
            self.ctrl_c()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(10)
        self.process.kill()
        raise AssertionError("Ctrl-C at the prompt did not end the chat")

    def rest(self) -> str:
        try:
            while data := os.read(self.end, 4096):
                self.shown += data.decode()
        except OSError:  # Linux says EIO once the other end is closed
            pass
        return self.shown


def test_ctrl_c_in_generate():
    with start("generate", "toy", "--prompt", "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(6) == b"w0 w1 "
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_ctrl_c_in_chat_stops_the_answer_and_then_the_chat():
    terminal = Terminal("chat", "toy")
    for message in ("Hello", "again"):
        terminal.wait_for("> ")
        terminal.type(f"{message}\n")
        terminal.wait_for("w2 ")
        terminal.ctrl_c()
        terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    assert terminal.ctrl_c_at_the_prompt() == 130
    assert "Traceback" not in terminal.rest()


def test_a_reader_that_leaves_is_no_error():
    with start("generate", "toy", "--prompt", "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(3)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == (b"", 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["--version"], ["generate", "toy", "--prompt", "x"]])
def test_a_full_disk_is_one_line(args):
    with open("/dev/full", "wb") as full, start(*args, stdout=full.fileno(), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        err = process.stderr.read().decode()
    assert process.returncode == 1 and err.startswith("labkit: error: ") and err.count("\n") == 1
    assert "No space left" in err
