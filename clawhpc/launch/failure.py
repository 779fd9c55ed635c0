"""Why a worker gave up: a note in its folder, for its campaign, which decides what that means for other workers."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from clawhpc.errors import HostError, UserError
from clawhpc.store import write_atomic

FAILURE_FILE = "failure.json"
"""In a worker's folder."""
CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
"""A disk that is full, over its quota, or may not be written."""
TRIAL_BYTES = 1 << 16
"""More than a note has; a disk that has no room for so much is full."""
Fault = Literal["user", "store", "host", "machine"]
"""Whose it is. `user`, `store`: every other worker would meet the same; `host`: those on it would; else unknown."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a worker says at its end."""

    fault: Fault
    host: str
    """As Slurm calls it, where the worker is one of its jobs."""
    reason: str
    """For a person."""


def fault_of(error: Exception, run_root: Path) -> Fault:
    """Whose fault it is that a worker of the run in `run_root` ends with `error`."""
    if isinstance(error, UserError):
        return "user"
    if isinstance(error, HostError):
        return "host"
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        return "store" if Path(_place(error)).is_relative_to(run_root) else "host"
    return "machine"


def note_failure(folder: Path, error: Exception, run_root: Path) -> None:
    """Leave a note in `folder`, a worker's, if anything can be written there: a campaign looks for itself if not."""
    place, number = _place(error), error.errno if isinstance(error, OSError) else None
    failure = Failure(
        fault=fault_of(error, run_root),
        host=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        reason=f"{os.strerror(number)}: {place}" if number and place else str(error),
    )
    with suppress(OSError):
        write_atomic(folder / FAILURE_FILE, msgspec.json.encode(failure))


def _place(error: Exception) -> str:
    """The file that could not be read or written, where `error` names one; of a copy, what it was to be written to."""
    return str(error.filename2 or error.filename or "") if isinstance(error, OSError) else ""


def read_failure(folder: Path) -> Failure | None:
    """What the worker of `folder` has noted. None for one that ended without a word.

    OSError, which names a file, where that may be so because nothing can be written there.
    """
    try:
        return msgspec.json.decode((folder / FAILURE_FILE).read_bytes(), type=Failure)
    except (FileNotFoundError, msgspec.MsgspecError):
        _try_to_write(folder)
        return None


def _try_to_write(folder: Path) -> None:
    trial = folder / f"{FAILURE_FILE}.trial"
    try:
        write_atomic(trial, bytes(TRIAL_BYTES))
        trial.unlink()
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(folder)) from error
