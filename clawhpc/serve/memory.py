"""Shared memory of an engine that ends with it, whatever ends it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
"""From <linux/sched.h>."""
SHARED_MEMORY = "/dev/shm"


def have_own_shared_memory() -> None:
    """From now on /dev/shm is this process's own and that of those it starts; the kernel empties it with the last one.

    The workers of a vLLM engine share memory by files there, which stay when they are killed, under names that say
    nothing. To be called before the process has threads. Where the kernel allows no user namespaces, nothing changes,
    and its log says so: then what a kill leaves there is for the end of the job, or of the machine, to remove.
    """
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _call("mount", b"tmpfs", SHARED_MEMORY.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=700")
    except OSError as error:
        print(f"{SHARED_MEMORY} is the host's: {error}", flush=True)  # noqa: T201 # the engine's log


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc[name](*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
