"""A campaign's sign of life, for its workers on other hosts: nobody there is told when it dies.

It is a file that keeps changing. Who looks at it goes by what it reads and by how often it has looked, so that neither
the clocks of two hosts nor a time stamp of the file system matter. It is written over in place: a full disk does not
end it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clawhpc.store import write_atomic

log = logging.getLogger(__name__)

SIGNS_PER_LEASE = 8
"""So that one that is late, or seen late, does not end a campaign's workers."""
NOBODY = "nobody"


@contextmanager
def hold_lease(path: Path, holder: str, lease_s: float) -> Iterator[None]:
    """Within the block `path` says that `holder` lives; after it, that nobody does."""
    write_atomic(path, _sign(holder, 0))
    ended = threading.Event()

    def give_signs() -> None:
        for number in itertools.count(1):
            if ended.wait(lease_s / SIGNS_PER_LEASE):
                return
            try:
                _write_over(path, _sign(holder, number))
            except OSError as error:
                log.warning("workers will end if this goes on: %s", error)

    thread = threading.Thread(target=give_signs, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(lease_s)
        with suppress(OSError):  # then they see that it does not change any more
            _write_over(path, _sign(NOBODY, 0))


def wait_for_end(path: Path, holder: str, lease_s: float) -> None:
    """Return when `holder` has ended: another one is named in `path`, or `path` has not changed for `lease_s`.

    However long the file system takes to answer, that is one look: it may hang for the campaign as well.
    """
    sign, looks = b"", 0
    while looks < SIGNS_PER_LEASE:
        with suppress(OSError):  # no news
            seen = path.read_bytes()
            if seen and not seen.startswith(holder.encode()):
                return
            if seen != sign:
                sign, looks = seen, 0
        time.sleep(lease_s / SIGNS_PER_LEASE)
        looks += 1


def _sign(holder: str, number: int) -> bytes:
    """Always as long, so that writing over leaves nothing of the one before."""
    return f"{holder:<16} {number:012d}\n".encode()


def _write_over(path: Path, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.write(data)
