"""Ends what a dead owner has left behind: its processes, the mounts in its scratch folder, the folder.

This file is also the watchdog's whole program (`python -I -S reap.py ROOT OWNER`). It imports the standard library
only: the watchdog starts in 30 ms, takes 10 MB, and needs nothing of an environment that may be going away around it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REAP_S = 8.0
"""How long to go on killing. The promise is 10 s after the owner's death, removing the folder included."""
QUIET_S = 0.2
"""For a process to come out of an exec."""
NUM_THREADS = 17
"""Where `/proc/PID/stat` has the number of threads, counted from the state."""
RESCAN_S = 0.01
"""Between two looks at /proc while killed processes go."""
REMOVE_S = 60.0
"""For one tree; half a million files take 5 s on a disk of one's own. What is left then is the next one's to remove."""
REMOVE = ("rm", "-rf", "--one-file-system")
UNLOCK = ("chmod", "-R", "u+rwx")
ARMED = b"armed\n"
"""What the watchdog says once the owner may rely on it."""


def owner_marker(owner: str) -> str:
    """What every process of `owner` carries in its environment, and no other process by chance."""
    return f"clawhpc-owner-{owner}"


def kill_marked(
    marker: str, *, session: int | None = None, place: Path | None = None, deadline_s: float, quiet_s: float = 0.0
) -> list[int]:
    """End every process that `find_marked` finds, until there is none; returns those still there after `deadline_s`.

    They are stopped before they are killed: what is stopped does not fork. `session`: one that is known to be theirs.
    `place`: of an owner, see `find_marked`.
    In the middle of an exec a process shows no environment; who knows no session waits until none has shown itself for
    `quiet_s`.
    """
    until = time.monotonic() + deadline_s
    seen_at = time.monotonic()
    sessions = set() if session is None else {session}
    frozen: set[int] = set()
    while (found := find_marked(marker, sessions, place)) or time.monotonic() < seen_at + quiet_s:
        if found:
            seen_at = time.monotonic()
        if seen_at > until:
            return sorted(found)
        if found <= frozen:
            signal_all(found, signal.SIGKILL)
            time.sleep(RESCAN_S)
        else:
            signal_all(found - frozen, signal.SIGSTOP)
            frozen |= found
    return []


def find_marked(marker: str, sessions: set[int], place: Path | None = None) -> set[int]:
    """Every living process that carries `marker` in its environment or is in `sessions`, and all that descend from one.

    The caller is never found. The marker counts anywhere in the environment, not only as a variable of its own:
    Apptainer's runtime replaces its environment by one JSON text that holds ours. Processes of others, whose
    environment we may not read, are not ours. `sessions` grows by those that a found process leads, for their members
    are its descendants even when those between have died, as Apptainer's FUSE processes show. Where their leader died
    first, by Slurm's hand say, only files tell: in `place`, an owner's scratch, they have one of a container's open.
    """
    processes = read_processes()
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    reached = [
        pid
        for pid, process in processes.items()
        if process.session in sessions or process.carries(marker) or (place is not None and process.belongs_to(place))
    ]
    found: set[int] = set()
    while reached:
        pid = reached.pop()
        if pid not in found:
            found.add(pid)
            reached += children.get(pid, [])
    sessions |= {pid for pid in found if processes[pid].session == pid}
    return found


class Process(NamedTuple):
    """One row of the process table."""

    pid: int
    parent: int
    session: int

    def carries(self, marker: str) -> bool:
        """`marker` stands in its environment, as it was when its program started; or in its command line, which alone
        can be read of the first process of a container (it lets nobody trace it).
        """
        place = Path(f"/proc/{self.pid}")
        with suppress(FileNotFoundError, ProcessLookupError):
            try:
                return marker.encode() in (place / "environ").read_bytes()
            except PermissionError:
                ours = re.search(rf"^Uid:\t{os.getuid()}\t", (place / "status").read_text(errors="replace"), re.M)
                return bool(ours) and marker.encode() in (place / "cmdline").read_bytes()
        return False

    def belongs_to(self, place: Path) -> bool:
        """It has a file of a container in `place` open, and is not the owner, who has its own lock open as well."""
        folder = f"/proc/{self.pid}/fd"
        files = set()
        with suppress(OSError):
            for number in os.listdir(folder):
                with suppress(OSError):
                    files.add(os.readlink(f"{folder}/{number}"))
        return any(file.startswith(f"{place}/run-") for file in files) and f"{place}.lock" not in files


def read_processes() -> dict[int, Process]:
    """The process table by pid, without ourselves and those that are dead but not waited for."""
    found = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            # The second field of `stat`, the name, may hold spaces and brackets.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            state, parent, _, session = fields[:4]
            # A zombie with other threads lives: its first thread has ended, or another one is in the middle of an exec.
            if (state not in "ZX" or int(fields[NUM_THREADS]) > 1) and pid != os.getpid():
                found[pid] = Process(pid, int(parent), int(session))
    return found


def signal_all(pids: set[int], number: signal.Signals) -> None:
    """Send one signal to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def unmount_below(folder: Path) -> None:
    """Detach every mount in `folder`, the innermost first."""
    for point, kind in reversed(mounts_below(folder)):
        command = ["fusermount3", "-u", "-z"] if kind.startswith("fuse") else ["umount", "-l"]
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([*command, str(point)], timeout=2, check=False, capture_output=True)


def mounts_below(folder: Path) -> list[tuple[Path, str]]:
    """Mount points in `folder` and their kinds, in order of mounting; the kernel writes a space as `\\040`."""
    rows = [line.split(" ") for line in Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()]
    points = [(Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), row[1])), row[2]) for row in rows]
    return [(point, kind) for point, kind in points if point.is_relative_to(folder)]


def remove_tree(folder: Path) -> None:
    """Remove `folder` and all in it, as far as it can be within REMOVE_S. Raises nothing, and follows no link.

    By programs that no depth of nesting exhausts and that can be stopped. Folders that their maker has left without
    permissions (package caches do) are opened first if need be.
    """
    until = time.monotonic() + REMOVE_S
    for command in (REMOVE, UNLOCK, REMOVE):
        if not os.path.lexists(folder):
            return
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*command, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=max(0.0, until - time.monotonic()),
            )


def reap(root: Path, owner: str) -> list[int]:
    """Remove all that `owner` left behind, its lock last; if processes would not die, keeps it and returns them."""
    survivors = kill_marked(owner_marker(owner), place=root / owner, deadline_s=REAP_S, quiet_s=QUIET_S)
    unmount_below(root / owner)
    remove_tree(root / owner)
    if not survivors and not (root / owner).exists():
        lock_path(root, owner).unlink(missing_ok=True)
    return survivors


def lock_path(root: Path, owner: str) -> Path:
    """Locked as long as the owner lives."""
    return root / f"{owner}.lock"


def watch(root: Path, owner: str) -> None:
    """Wait for the owner's end, however it comes, and reap. Standard input is a pipe that only the owner holds open."""
    os.write(sys.stdout.fileno(), ARMED)
    os.read(sys.stdin.fileno(), 1)
    reap(root, owner)


def detach() -> None:
    """Leave the owner's process tree, session and signals: who ends those must not end the watchdog with them."""
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    detach()
    watch(Path(sys.argv[1]), sys.argv[2])
