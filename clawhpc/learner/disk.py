"""What goes wrong while the learner writes, as one kind of error that names the place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from clawhpc.store import named_errors

OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors, which writes in Rust, passes on the number of an error."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A disk that is full or may not be written is an OSError that names a file, whichever library met it.

    `path` is what is being written, for an error that names none; safetensors and torch raise errors of other kinds.
    """
    with named_errors(path):
        try:
            yield
        except (RuntimeError, SafetensorError) as error:
            number = _error_number(error)
            if number is None:
                raise
            raise OSError(number, os.strerror(number), str(path)) from error


def _error_number(error: Exception) -> int | None:
    """The system's number for `error`; None when the system had no part in it."""
    if isinstance(error.__context__, OSError):  # torch, of a file that it was given
        return error.__context__.errno
    found = OS_ERROR.search(str(error))
    return int(found[1]) if found else None
