"""A process that does not outlive the one that started it, whatever ends that one."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""


def die_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends, and so when its process does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
