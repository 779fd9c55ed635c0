"""Whether the folder of runs gives what campaigns rely on: whole files, each claim once, locks, room."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawhpc.checkup.finding import Finding, State
from clawhpc.checkup.machine import Machine
from clawhpc.sandbox.disk import Place, place_of
from clawhpc.store import write_atomic, write_once

GIB = 1 << 30
LOCKS_OF_ONE_HOST = ("localflock", "nolock", "local_lock=flock", "local_lock=all")
"""Mount options of Lustre and NFS with which a lock binds the processes of one host only."""
SLOW_S = 1.0
"""For one file to be on disk under its name: a rollout ends with one, and so does each claim."""
ROOM_GIB, LEAST_GIB = 10, 1
"""Free: with less than the first a campaign may end early; with less than the second it hardly begins."""
FEW_FILES = 10_000
"""A rollout is a file, and a step has some hundreds."""
HELD, NO_LOCKS = 3, 4
TRY_LOCK = f"""
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit({HELD})
    except OSError:
        sys.exit({NO_LOCKS})
"""
ELSEWHERE = "run.root=FOLDER, on another file system"


def existing(folder: Path) -> Path:
    """`folder`, or the nearest above it that is there, as far as we may look."""
    return next(one for one in (folder, *folder.parents) if os.path.isdir(one))


def check_run_folder(root: Path, machine: Machine, *, shared: bool) -> list[Finding]:
    """Rows for the folder of runs, in which a file is written and removed. `shared`: other hosts must see it."""
    folder = existing(root)
    place = place_of(folder.resolve(), machine.read("/proc/self/mounts"))
    try:
        with tempfile.TemporaryDirectory(prefix=".clawhpc-doctor-", dir=folder) as own:
            written = check_writing(Path(own), folder, place, shared=shared)
            locked = check_locks(Path(own) / "lock", machine, place)
    except OSError as error:
        found = f"{folder}: {error.strerror}"
        return [Finding(what="run folder", state=State.MISSING, found=found, remedy=ELSEWHERE)]
    return [written, locked, check_room("room for runs", *room_in(folder), ELSEWHERE)]


def check_writing(own: Path, folder: Path, place: Place, *, shared: bool) -> Finding:
    """Whether a file is replaced whole, and a claim given once, in `own`."""
    what, began = "run folder", time.monotonic()
    write_atomic(own / "file", b"old")
    write_atomic(own / "file", b"new")
    claims = [write_once(own / "claim", b"first"), write_once(own / "claim", b"second")]
    took_s = (time.monotonic() - began) / 4
    found = f"{folder}: {place.kind}, {1000 * took_s:.0f} ms for a file to be on disk"
    if (own / "file").read_bytes() != b"new" or claims != [True, False]:
        return Finding(what=what, state=State.MISSING, found=f"{found}; a name is given twice", remedy=ELSEWHERE)
    if shared and not place.is_network:
        return Finding(what=what, state=State.LIMITED, found=f"{found}; do other hosts see it?", remedy=ELSEWHERE)
    if took_s > SLOW_S:
        return Finding(what=what, state=State.LIMITED, found=found, remedy=ELSEWHERE)
    return Finding(what=what, state=State.WORKS, found=found)


def check_locks(file: Path, machine: Machine, place: Place) -> Finding:
    """Whether of two processes one is kept out while the other has the lock, and let in afterwards."""
    what, flock = "locks of runs", "mount it with flock (for Lustre: mount -o flock), or " + ELSEWHERE
    try:
        with _locked(file):
            while_held = _try_lock(file, machine)
        afterwards = _try_lock(file, machine)
    except OSError as error:
        return Finding(what=what, state=State.MISSING, found=f"none here: {error.strerror}", remedy=flock)
    if (while_held, afterwards) != (HELD, 0):
        found = f"another process saw {while_held} while it was held, {afterwards} afterwards"
        return Finding(what=what, state=State.MISSING, found=found, remedy=flock)
    weak = [option for option in place.options if option in LOCKS_OF_ONE_HOST]
    if weak:
        found = f"they bind this host only ({', '.join(weak)}): start a run from one host"
        return Finding(what=what, state=State.LIMITED, found=found, remedy=flock)
    return Finding(what=what, state=State.WORKS, found="flock keeps a second process out")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _try_lock(file: Path, machine: Machine) -> int:
    return machine.ask(sys.executable, "-I", "-S", "-c", TRY_LOCK, str(file)).exit_code


def room_in(folder: Path) -> tuple[int, int | None]:
    """Bytes and files that this user may still put there; None where files are not limited."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize, space.f_favail if space.f_files else None


def check_room(what: str, free_bytes: int, free_files: int | None, remedy: str) -> Finding:
    """Whether there is room. `free_files`: None where there is no limit."""
    free_gib = free_bytes / GIB
    few = free_files is not None and free_files < FEW_FILES
    found = f"{free_gib:.1f} GiB free" + (f", and only {free_files} files" if few else "")
    if free_gib < LEAST_GIB or free_files == 0:
        return Finding(what=what, state=State.MISSING, found=found, remedy=remedy)
    if free_gib < ROOM_GIB or few:
        return Finding(what=what, state=State.LIMITED, found=found, remedy=remedy)
    return Finding(what=what, state=State.WORKS, found=found)


def check_quota(machine: Machine) -> Finding:
    """Whether this user is over a quota, where quota(1) can tell."""
    if machine.find("quota") is None:
        return Finding(what="quota", state=State.NOT_NEEDED, found="no quota program; ask your cluster's own")
    answer = machine.ask("quota", "-w")
    told = answer.output
    if not told and not answer.ok:
        return Finding(what="quota", state=State.NOT_NEEDED, found=answer.reason)
    over = [line.split()[0] for line in told.splitlines() if re.search(r"\d\*", line)]
    if over:
        found = f"over it on {', '.join(over)}"
        return Finding(what="quota", state=State.LIMITED, found=found, remedy=f"quota -w; remove files, or {ELSEWHERE}")
    return Finding(what="quota", state=State.WORKS, found="none" if ": none" in told or not told else "not used up")
