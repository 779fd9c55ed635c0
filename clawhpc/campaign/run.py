"""The folder of a run: which one a command goes on with, and that it is alone there."""

from __future__ import annotations

import errno
import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from clawhpc.launch.turn import Turn
from clawhpc.lock import alone
from clawhpc.paths import RunPaths
from clawhpc.store import write_atomic

log = logging.getLogger(__name__)


@contextmanager
def open_run(
    folder: Path, config: bytes, *, wait_s: float = 0.0, reopen: bool = False, turn: Turn | None = None
) -> Iterator[RunPaths]:
    """The unfinished run in `folder` with this very configuration, or a new one; nobody else has it within the block.

    So the same command goes on after a kill, and begins afresh after a run that has finished, unless it may `reopen`
    one; of two same commands that begin at once, one begins it. UserError when another process is still at work on it
    after `wait_s`, or where its file system cannot tell. `turn`: of the job in which we are, for `finished_before`.
    """
    newest = max(run_numbers(folder), default=0)  # before the look for our own: what comes after it meets `new_run`
    paths = find_run(folder, config, finished_too=reopen) or new_run(folder, config, newest + 1, reopen)
    with alone(paths.lock, paths.root, wait_s=wait_s):
        if turn is not None:
            write_atomic(paths.turn, msgspec.json.encode(turn))
        yield paths


def finished_before(folder: Path, config: bytes, turn: Turn | None) -> bool:
    """A former turn of the same job has finished a run with this configuration: its command has nothing left to do.

    For Slurm may put a job back into the queue until the very last of its processes has ended. A script may give the
    same command several times: the run is this turn's now, and the next such command in it looks for another one.
    """
    if turn is None:
        return False
    for paths in runs_in(folder):
        if paths.finished.exists() and goes_on(paths, config, finished_too=True) and is_former(paths, turn):
            write_atomic(paths.turn, msgspec.json.encode(turn))
            log.info("run %s was finished by a former turn of this job: nothing is left to do", paths.root)
            return True
    return False


def is_former(paths: RunPaths, turn: Turn) -> bool:
    """A turn of the same job before `turn` was the last one to have this run."""
    if not paths.turn.exists():
        return False
    last = msgspec.json.decode(paths.turn.read_bytes(), type=Turn)
    return last.job_id == turn.job_id and last.number < turn.number


def find_run(folder: Path, config: bytes, *, finished_too: bool = False) -> RunPaths | None:
    """The unfinished run with this configuration; the newest, if there are several."""
    return next((paths for paths in runs_in(folder) if goes_on(paths, config, finished_too)), None)


def goes_on(paths: RunPaths, config: bytes, finished_too: bool) -> bool:
    """A command with this configuration goes on with this run."""
    is_over = paths.finished.exists() and not finished_too
    return not is_over and paths.config.exists() and paths.config.read_bytes() == config


def new_run(folder: Path, config: bytes, number: int, finished_too: bool) -> RunPaths:
    """A run under the first number from `number` on that is free, or the run of who has just begun the very same.

    A folder has its number and its configuration at once, so that of two that begin together the later one knows whose
    run it meets.
    """
    part = folder / f".{uuid.uuid4().hex}.part"
    try:
        write_atomic(RunPaths(part).config, config)
        while True:
            paths = RunPaths(folder / f"{number:03d}")
            if take_name(part, paths.root) or goes_on(paths, config, finished_too):
                return paths
            number += 1
    finally:
        shutil.rmtree(part, ignore_errors=True)


def take_name(part: Path, name: Path) -> bool:
    """The folder `part` is called `name` from now on; False where another one is."""
    try:
        part.rename(name)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def runs_in(folder: Path) -> list[RunPaths]:
    """Those of `folder`, the newest first."""
    return [RunPaths(folder / f"{number:03d}") for number in sorted(run_numbers(folder), reverse=True)]


def run_numbers(folder: Path) -> list[int]:
    """The numbers of the runs in `folder`."""
    return [int(root.name) for root in folder.glob("*") if root.name.isdecimal()]
