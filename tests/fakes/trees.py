"""Folders as a policy may leave them."""

from __future__ import annotations

import os
from pathlib import Path


def nest(folder: Path, levels: int, *, mode: int = 0o755) -> None:
    """Put `levels` folders into `folder`, each in the one before and of that `mode`, and a file into the last.

    Thousands are too deep for whoever recurses, and for a path.
    """
    outer = os.open(folder, os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir("in", dir_fd=outer)
        inner = os.open("in", os.O_DIRECTORY, dir_fd=outer)
        os.close(outer)
        outer = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=outer))
    for _ in range(levels):  # from the innermost outwards, for each may bar the way to those in it
        inner, outer = outer, os.open("..", os.O_DIRECTORY, dir_fd=outer)
        os.fchmod(inner, mode)
        os.close(inner)
    os.close(outer)
