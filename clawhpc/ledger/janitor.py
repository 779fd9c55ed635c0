"""What dead owners have left on this machine: found by the locks that died with them, described, cleared away."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clawhpc.errors import UserError
from clawhpc.ledger import reap

MOST_FILES = 10_000
"""That are counted in one folder: nobody needs to know more exactly, and a million take a while."""
DIE_S = 5.0
"""For an owner that is killed to be gone; more only where a disk hangs."""
POLL_S = 0.02
"""Between two looks whether it is: a lock that frees itself tells nobody."""


@dataclass(frozen=True, kw_only=True)
class Remains:
    """What is left of one owner that is dead."""

    owner: str
    pid: int | None
    """Of the owner while it lived; None where it died before it could say."""
    command: str
    job: str
    """Of Slurm, to which it belonged, as JOB.NODE.TURN; empty where it did to none."""
    processes: tuple[int, ...]
    """That it started, and what descends from them; a living owner that it started is among them."""
    mounts: tuple[Path, ...]
    num_sockets: int
    num_files: int
    """In its scratch folder, sockets among them; MOST_FILES stands for that or more."""

    @property
    def summary(self) -> str:
        """For a person, in one line."""
        who = f"process {self.pid} ({self.command})" if self.pid else "process unknown"
        who += f" of job {self.job}" if self.job else ""
        return (
            f"{self.owner}: {who} has left {len(self.processes)} processes, {len(self.mounts)} mounts, "
            f"{self.num_sockets} sockets, {self.num_files} files"
        )


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """What has become of the remains."""

    owners: tuple[str, ...]
    """Of whom nothing is left."""
    failures: tuple[str, ...]
    """A line for each of whom something is."""


def find_remains(root: Path) -> tuple[Remains, ...]:
    """What there is of dead owners on `root`; touches none of it. UserError: see `check_private`."""
    return tuple(_describe(root, lock.stem) for lock in _locks(root) if _is_dead(lock))


def clear_remains(root: Path) -> Cleared:
    """Remove what owners on `root` left that have died together with their watchdogs. UserError: see `check_private`.

    Again as long as there were some: a nested owner dies only when the outer one is reaped.
    """
    owners: list[str] = []
    failures: dict[Path, str] = {}
    while cleared := [lock.stem for lock in _locks(root) if _clear(root, lock, failures)]:
        owners += cleared
        failures.clear()
    return Cleared(owners=tuple(owners), failures=tuple(failures.values()))


def end_job(root: Path, job: str) -> Cleared:
    """Remove all of the owners that belong to Slurm's job `job`, those that still live included. UserError: see above.

    `job` is JOB.NODE.TURN. For where it has ended, or begins anew, on this host: the daemons of Slurm can be killed
    too, and then its processes live on. Owners of its earlier turns go with it; of a later one, and of other jobs, only
    those that have died.
    """
    assert job, "owners without a job belong to nobody's"
    for lock in _locks(root):
        note = _note(lock)
        if _goes_with(note.get("job", ""), job):
            _end(int(note["pid"]), lock)
    return clear_remains(root)


def _goes_with(owners: str, job: str) -> bool:
    """The turn of a job to which an owner belongs ends with the turn `job`: a script may be late with its last line."""
    (owners_place, _, owners_turn), (place, _, turn) = owners.rpartition("."), job.rpartition(".")
    return owners_place == place and int(owners_turn) <= int(turn)


def _end(pid: int, lock: Path) -> None:
    """Kill the owner `pid`, if it is the one that holds `lock`; return when `lock` is free."""
    if _holds(pid, lock):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + DIE_S
        while lock.exists() and not _is_dead(lock) and time.monotonic() < until:
            time.sleep(POLL_S)


def _holds(pid: int, lock: Path) -> bool:
    """`pid` has `lock` open, and no other process that has its number by now."""
    with suppress(OSError):
        return str(lock) in (os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _clear(root: Path, lock: Path, failures: dict[Path, str]) -> bool:
    """Reap the owner whose lock file is `lock`, if it is dead; True if nothing of it is left. Never in anyone's way."""
    try:
        with _dead(lock):
            reap.reap(root, lock.stem)
    except (BlockingIOError, FileNotFoundError):
        return False  # it lives, or another process is reaping it, or has done so
    except OSError as error:
        failures[lock] = f"{lock}: left by an owner that died, and cannot be cleared away: {error}"
        return False
    if lock.exists():
        failures[lock] = f"{lock.with_suffix('')}: left by an owner that died; some of it cannot be killed or removed"
    return not lock.exists()


def _locks(root: Path) -> list[Path]:
    """Of all owners on `root`, dead and alive; none where there is no such folder."""
    if not os.path.lexists(root):
        return []
    check_private(root)
    return sorted(root.glob("*.lock"))


def check_private(root: Path) -> None:
    """UserError unless `root` is this user's own folder: what others put there must be neither trusted nor reaped."""
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{root}: must be a folder that only you may enter (chmod 700); remove it or choose another")


@contextmanager
def _dead(lock: Path) -> Iterator[None]:
    """The owner of `lock` is dead, and in the block nobody else clears it away. BlockingIOError where it may live.

    On a folder that hosts share, against all advice, the locks of another host may look free: its owners are its own.
    """
    file = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _note(lock).get("host", os.uname().nodename) != os.uname().nodename:
            raise BlockingIOError(f"{lock}: of another host")
        yield
    finally:
        os.close(file)


def _is_dead(lock: Path) -> bool:
    with suppress(OSError), _dead(lock):
        return True
    return False


def _note(lock: Path) -> dict[str, Any]:
    """What the owner wrote into its lock; nothing where it died before, or its lock is gone."""
    with suppress(ValueError, OSError):
        note = json.loads(lock.read_bytes())
        return note if isinstance(note, dict) else {}
    return {}


def _describe(root: Path, owner: str) -> Remains:
    note = _note(reap.lock_path(root, owner))
    num_files, num_sockets = _count(root / owner)
    return Remains(
        owner=owner,
        pid=note.get("pid"),
        command=" ".join(map(str, note.get("command", ()))),
        job=str(note.get("job", "")),
        processes=tuple(sorted(reap.find_marked(reap.owner_marker(owner), set(), root / owner))),
        mounts=tuple(point for point, _ in reap.mounts_below(root / owner)),
        num_sockets=num_sockets,
        num_files=num_files,
    )


def _count(folder: Path) -> tuple[int, int]:
    """Files and sockets in `folder`, of which no link is followed, as far as it can be read."""
    num_files = num_sockets = 0
    folders = [str(folder)]
    while folders and num_files < MOST_FILES:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    num_files += 1
                    num_sockets += stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
    return min(num_files, MOST_FILES), num_sockets
