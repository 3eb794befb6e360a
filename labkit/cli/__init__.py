"""The `labkit` command.

Exit status: 0 done, 1 the work failed, 2 wrong arguments, 130 stopped by Ctrl-C. Results go to stdout;
plans, progress and errors to stderr, an error in one line.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit status. `args` are sys.argv's unless given."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show is no reason to stop
    status = 0
    try:
        # Imported here, so that Ctrl-C during the import is met as well.
        from labkit.cli.app import run

        status = run(sys.argv[1:] if args is None else args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the clean-up too
        if sys.stderr.isatty():
            print(file=sys.stderr)  # the terminal has just shown ^C
        status = INTERRUPTED
    except OSError as error:  # stdout: a disk that is full, or a reader that has gone (which needs no word)
        if status == 0 and not isinstance(error, BrokenPipeError):
            print(
                f"labkit: error: cannot write the output: {error.strerror}",
                file=sys.stderr,
            )
        _discard_stdout()
        status = 1
    sys.exit(status)


def _discard_stdout() -> None:
    """Give what is still buffered a place to go, or Python complains about it while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
