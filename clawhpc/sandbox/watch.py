"""Measures what all processes of a container take of the host, and ends them where that is too much. No cgroup needed.

A part of init.py, the first program in a container: standard library only, Python 3.9 or newer.
"""

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOOK_S = 0.25
"""Between two looks at memory and processes, 0.5 ms each: a process can take a gigabyte meanwhile, hardly more."""
WALK_S = 1.0
"""Between two walks through what was written, at least: a millisecond each, where there are a few hundred files."""
SHARE = 0.1
"""Of the time that looks may take, however much there is to see; and so may walks, beside them."""
GB = 2**30
FILE_BYTES = 16384
"""A file costs, besides its content: of empty ones, a quarter of a million take the verifier long enough."""
GONE = (FileNotFoundError, ProcessLookupError, NotADirectoryError)
"""What was there just now. Any other error of a look is one that blinds it."""


class Watch:
    """Ends all that runs in the container once it takes more than `limits`, by looking again and again.

    What it cannot measure it ends too: no file can be opened any more, or a folder lies deeper than a path can be.
    Not seen: files that no folder shows and that only such a process has open as hides what it has (prctl(2),
    PR_SET_DUMPABLE), and memory that neither a process nor an open file holds (a tmpfs in yet another namespace).
    """

    def __init__(self, limits: dict, folders: list) -> None:
        """`folders`: those that can be written. What lies there now does not count."""
        self.limits = limits
        self.folders = folders
        self.disks = {os.stat(folder).st_dev for folder in folders}
        self.tmpfs = {device: folder for device, folder in writable_tmpfs().items() if device not in self.disks}
        self.written_before = written(folders)
        self.memory_in_files = 0
        self.exceeded = ""
        self.ended = threading.Event()

    def start(self) -> None:
        """From now on. A walk may take long, and memory be gone meanwhile: so there are two who look."""
        for look, pause_s in ((self.processes, LOOK_S), (self.disk, WALK_S)):
            threading.Thread(target=self.look_on, args=(look, pause_s), daemon=True).start()

    def end(self) -> str:
        """The command is dead: look a last time at what it has written. What was too much, or nothing."""
        self.ended.set()
        return self.exceeded or told_by(self.disk)

    def look_on(self, look: Callable[[], str], least_pause_s: float) -> None:
        """Until there is too much, or an end; who stops looking before, for whatever reason, ends what it looks at."""
        exceeded, pause_s = "", least_pause_s
        try:
            while not exceeded and not self.ended.wait(pause_s):
                began = time.monotonic()
                exceeded = told_by(look)
                pause_s = max(least_pause_s, (time.monotonic() - began) / SHARE)
        finally:
            if not self.ended.is_set():
                self.exceeded = self.exceeded or exceeded
                with suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)

    def processes(self) -> str:
        """What there is too much of, in words, of processes and memory; empty if nothing."""
        pids = other_processes()
        if len(pids) > self.limits["max_processes"]:  # a bomb is not looked at any closer
            return self.too_many(len(pids))
        found = usage(pids)
        return self.too_many(sum(threads for threads, _, _ in found.values())) or self.memory(found)

    def too_many(self, number: int) -> str:
        """Whether there are more processes than there may be."""
        most = self.limits["max_processes"]
        return f"processes: {number} at a time, threads among them; the limit is {most}" if number > most else ""

    def memory(self, found: dict) -> str:
        """Whether they take too much memory; shared pages are told apart only where it matters.

        Files in memory may be mapped too. Which are is not known, so of both kinds of shared memory the larger counts.
        """
        most = self.limits["memory_bytes"]
        in_files = self.memory_in_files + segments() + sum(map(used_bytes, self.tmpfs.values()))
        if in_files + sum(mapped + tables for _, mapped, tables in found.values()) <= most:
            return ""
        taken, shared = exact_memory(found)
        return beyond("memory", taken - shared + max(shared, in_files), most)

    def disk(self) -> str:
        """Whether too much was written."""
        deleted = open_deleted(usage(other_processes()))
        taken = written(self.folders) + sum(size for device, size in deleted if device in self.disks)
        self.memory_in_files = sum(size for device, size in deleted if device not in {*self.disks, *self.tmpfs})
        return beyond("disk", taken - self.written_before, self.limits["disk_bytes"])


def told_by(look: Callable[[], str]) -> str:
    """What `look` says, or that it cannot."""
    try:
        return look()
    except OSError as error:
        return f"files: what it takes cannot be measured any more: {error.strerror}"


def beyond(what: str, taken: int, most: int) -> str:
    """For a person, if more than `most` bytes are taken; else nothing."""
    return f"{what}: {taken / GB:.2f} GB; the limit is {most / GB:.2f} GB" if taken > most else ""


# ---- processes and their memory -------------------------------------------------------------------------------------


def other_processes() -> list:
    """Of the container, all but ourselves."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def usage(pids: list) -> dict:
    """Place in /proc of each process -> number of its threads, bytes that it maps, bytes of its page tables."""
    found = {}
    for pid in pids:
        with suppress(*GONE):
            place, status = living(pid)
            mapped = status.get("VmRSS", 0) + status.get("VmSwap", 0)
            found[place] = status["Threads"], 1024 * mapped, 1024 * status.get("VmPTE", 0)
    return found


def living(pid: int) -> tuple:
    """Where in /proc to look at a process, and its status: it may go on though its first thread has ended."""
    place = f"/proc/{pid}"
    status = status_of(place)
    if status["Threads"] > 1 and "VmRSS" not in status:
        for thread in os.listdir(f"{place}/task"):
            with suppress(*GONE):
                other = status_of(f"{place}/task/{thread}")
                if "VmRSS" in other:
                    return f"{place}/task/{thread}", other
    return place, status


def status_of(place: str) -> dict:
    """What the kernel says of a process in numbers, memory in kB."""
    with open(f"{place}/status", errors="replace") as file:
        pairs = [line.split()[:2] for line in file]
    return {pair[0][:-1]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def exact_memory(found: dict) -> tuple:
    """Bytes that the processes take together, and those of them that are shared memory; a shared page counts once."""
    total = shared = 0
    for place, (_, mapped, tables) in found.items():
        total += tables
        try:
            with open(f"{place}/smaps_rollup", "rb") as file:
                kb = {line.split()[0]: int(line.split()[1]) for line in file.readlines()[1:]}
            total += 1024 * (kb[b"Pss:"] + kb.get(b"SwapPss:", 0))
            shared += 1024 * kb.get(b"Pss_Shmem:", 0)
        except PermissionError:
            total += mapped
        except GONE:
            pass
    return total, shared


def segments() -> int:
    """Bytes of shared memory of the old kind (shmget(2)), which may be attached to no process."""
    with suppress(FileNotFoundError), open("/proc/sysvipc/shm") as file:
        names, *rows = map(str.split, file)
        return sum(int(row[names.index(column)]) for row in rows for column in ("rss", "swap"))
    return 0


def writable_tmpfs() -> dict:
    """Device -> mount point of every file system in memory that can be written."""
    found = {}
    with open("/proc/self/mountinfo", errors="replace") as file:
        for _, _, device, _, point, options, *more in map(str.split, file):
            if more[more.index("-") + 1] == "tmpfs" and "rw" in options.split(","):
                number = os.makedev(*map(int, device.split(":")))
                with suppress(OSError):
                    if os.stat(point).st_dev == number:  # else another one lies over it
                        found[number] = point
    return found


def used_bytes(folder: str) -> int:
    """Of the file system of `folder`."""
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


# ---- files ----------------------------------------------------------------------------------------------------------


def written(folders: list) -> int:
    """Bytes on disk of all that lies in `folders`; no link is followed, and a file with several names counts once.

    OSError where some of it cannot be seen.
    """
    total, linked, todo = 0, set(), list(folders)
    while todo:
        for path, status in listed(todo.pop()):
            if stat.S_ISDIR(status.st_mode):
                todo.append(path)
            elif status.st_nlink > 1:
                if (status.st_dev, status.st_ino) in linked:
                    continue
                linked.add((status.st_dev, status.st_ino))
            total += FILE_BYTES + 512 * status.st_blocks
    return total


def listed(folder: str) -> list:
    """Path and status of what lies in `folder`, as far as it is still there.

    One that its owner has locked is opened: who has it as a current directory goes on to write there.
    """
    with suppress(*GONE):
        try:
            return entries(folder)
        except PermissionError:
            with suppress(OSError):  # another's, or read-only: nothing can be written there either
                os.chmod(folder, stat.S_IRWXU)
                return entries(folder)
    return []


def entries(folder: str) -> list:
    """As `listed`, but PermissionError where it is locked."""
    found = []
    with os.scandir(folder) as files:
        for file in files:
            with suppress(FileNotFoundError):
                found.append((file.path, file.stat(follow_symlinks=False)))
    return found


def open_deleted(found: dict) -> list:
    """Device and bytes of each file that no folder shows any more, or ever has, but that a process has open."""
    sizes = {}
    for place in found:
        with suppress(PermissionError, *GONE):
            for name in os.listdir(f"{place}/fd"):
                with suppress(OSError):
                    status = os.stat(f"{place}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        sizes[status.st_dev, status.st_ino] = 512 * status.st_blocks
    return [(device, size) for (device, _), size in sizes.items()]
