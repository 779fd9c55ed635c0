"""A process with its descendants: started together, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import Process

REAP_S = 2.0
"""For the kernel to take away what was killed."""


@asynccontextmanager
async def running(
    command: Sequence[str], *, environment: dict[str, str], folder: Path, log: Path, stop_timeout_s: float
) -> AsyncIterator[Process]:
    """The process of `command` in `folder`, in a session of its own; its output is added to `log`.

    However the block ends, the process and all of its session are gone after it: asked to end, then killed.
    """
    with log.open("ab") as output:
        process = await anyio.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process, stop_timeout_s)


async def _stop(process: Process, stop_timeout_s: float) -> None:
    with anyio.move_on_after(stop_timeout_s), suppress(ProcessLookupError):
        process.terminate()
        await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with anyio.move_on_after(REAP_S):
        await process.wait()
    await process.aclose()


def session_cpu_s(session: int) -> float:
    """User and system seconds so far of the living processes of a session and of their ended children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # from the state on: the name may hold anything
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
