"""The folder of a run: which one a command goes on with, and that it is alone there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawhpc.lock import alone
from clawhpc.paths import RunPaths
from clawhpc.store import write_atomic


@contextmanager
def open_run(folder: Path, config: bytes, *, wait_s: float = 0.0, reopen: bool = False) -> Iterator[RunPaths]:
    """The unfinished run in `folder` with this very configuration, or a new one; nobody else has it within the block.

    So the same command goes on after a kill, and begins afresh after a run that has finished, unless it may `reopen`
    one. UserError when another process is still at work on it after `wait_s`, or where its file system cannot tell.
    """
    paths = find_run(folder, config, finished_too=reopen) or new_run(folder, config)
    with alone(paths.lock, paths.root, wait_s=wait_s):
        yield paths


def find_run(folder: Path, config: bytes, *, finished_too: bool = False) -> RunPaths | None:
    """The unfinished run with this configuration; the newest, if there are several."""
    for number in sorted(run_numbers(folder), reverse=True):
        paths = RunPaths(folder / f"{number:03d}")
        is_over = paths.finished.exists() and not finished_too
        if not is_over and paths.config.exists() and paths.config.read_bytes() == config:
            return paths
    return None


def new_run(folder: Path, config: bytes) -> RunPaths:
    """A run under the next free number, which is its own also when two begin at once."""
    folder.mkdir(parents=True, exist_ok=True)
    number = max(run_numbers(folder), default=0)
    while True:
        number += 1
        try:
            (folder / f"{number:03d}").mkdir()
        except FileExistsError:
            continue
        paths = RunPaths(folder / f"{number:03d}")
        write_atomic(paths.config, config)
        return paths


def run_numbers(folder: Path) -> list[int]:
    """The numbers of the runs in `folder`."""
    return [int(root.name) for root in folder.glob("*") if root.name.isdecimal()]
