"""Shared memory of a process that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from clawhpc.serve.memory import SHARED_MEMORY
from tests.sandbox_parts import missing

SHARE = """
import os, secrets, signal
from multiprocessing.shared_memory import SharedMemory
from clawhpc.serve.memory import have_own_shared_memory
have_own_shared_memory()
memory = SharedMemory(create=True, size=100)
print(os.getuid(), memory.name, os.path.exists("/dev/shm/" + memory.name), flush=True)
os.killpg(0, signal.SIGKILL)
"""


def test_what_a_killed_process_and_its_keepers_leave_in_shared_memory_is_gone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARE], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    if "is the host's" in done.stdout:
        missing(done.stdout)
    user, name, was_there = done.stdout.split()
    assert was_there == "True", done.stderr
    assert user == str(os.getuid())
    assert done.returncode < 0
    assert not (Path(SHARED_MEMORY) / name).exists()
