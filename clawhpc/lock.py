"""One process at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clawhpc.errors import UserError

POLL_S = 0.1
"""Between two tries for a lock that another process holds; flock(2) itself would wait without a deadline."""


@contextmanager
def alone(lock: Path, what: object, *, wait_s: float = 0.0) -> Iterator[None]:
    """Nobody else is in such a block with this `lock`, a file; the kernel frees it when its holder dies.

    UserError, which names `what` it guards and who holds it, after `wait_s`; and where the file system has no locks.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        _take(file, what, time.monotonic() + wait_s)
        _sign(file, lock)
        yield


def _sign(file: IO[str], lock: Path) -> None:
    """Unbuffered: what a full disk does not take must not be tried again when the file is closed."""
    try:
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(lock)) from error


def _take(file: IO[str], what: object, until: float) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                file.seek(0)
                raise UserError(f"{what} is in use by {file.read().strip() or 'another process'}") from None
            time.sleep(POLL_S)
        except OSError as error:
            raise UserError(
                f"{what} cannot be locked ({error.strerror}): choose a file system with flock(2), for Lustre one that "
                "is mounted with `-o flock`"
            ) from error
