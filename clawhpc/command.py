"""What every command has in common: how its process is prepared, what it prints, and how it ends.

What a person can mend ends it with one line on standard error and a code that says whose affair it is; a bug keeps its
traceback. A reader of its output that goes away, as `| head` does, ends it as it ends other programs: without a word.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from clawhpc.errors import ClawError, UserError

EXIT_USER = 2
EXIT_MACHINE = 1
EXIT_INTERRUPTED = 130
FAILED = "clawhpc: "
"""What the one line begins with that says why a command has failed."""


def prepare_process() -> None:
    """What is true of every command's process: its threads, and what ends it."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the cores from harnesses
    signal.signal(signal.SIGTERM, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A batch system's way to say Ctrl-C. It may say it twice: the second must not cut short what the first began."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def start_log() -> None:
    """Plain lines with the time, on standard output."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout, force=True
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else a line for each request to a judge


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around all of a command: what a person can mend ends the program with one line and no traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, and not as the last thing that Python does, when nobody can catch what it raises
    except UserError as error:
        fail(str(error), EXIT_USER)
    except ClawError as error:
        fail(str(error), EXIT_MACHINE)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            end_unread()
        place = error.filename2 or error.filename  # of a copy, the second is what could not be written
        fail(f"{error.strerror}: {place}" if place else str(error), EXIT_MACHINE)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on", EXIT_INTERRUPTED)


def fail(message: str, code: int) -> NoReturn:
    """End the program with one line for a person."""
    sys.stdout.flush()
    print(f"{FAILED}{' '.join(message.split())}", file=sys.stderr)  # noqa: T201
    raise SystemExit(code)


def is_unread() -> bool:
    """Our standard output is a pipe of which nobody holds the other end any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def end_unread() -> NoReturn:
    """By the signal that ends a program that nobody reads, which Python otherwise has ignored."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.raise_signal(signal.SIGPIPE)
    raise AssertionError("no process outlives it")
