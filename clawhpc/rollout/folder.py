"""A rollout's own folder: workspace, HOME and sockets, while it lasts."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio import from_thread

from clawhpc.errors import SandboxError, boundary
from clawhpc.ledger import discard
from clawhpc.records import TEARDOWN_S, TaskSpec
from clawhpc.rollout.trace import Trace
from clawhpc.verify.workspace import OPEN_FILE, OPEN_FOLDER, allow

WORKSPACE, HOME, SOCKET = "workspace", "home", "p"
"""What lies in a rollout's folder. The socket's name is short: the path of a unix socket has 107 bytes at most."""


@asynccontextmanager
async def rollout_folder(scratch: Path, trace: Trace) -> AsyncIterator[Path]:
    """A folder of the rollout's own, gone afterwards whatever happened in it, cancellation included."""
    with boundary(SandboxError, "boot"):
        folder = Path(await anyio.mkdtemp(prefix="r", dir=str(scratch)))
    try:
        yield folder
    finally:
        start = anyio.current_time()
        await discard(folder, within_s=TEARDOWN_S)
        trace.seconds["teardown"] = anyio.current_time() - start


def lay_out(task: TaskSpec, folder: Path) -> None:
    """The workspace as the task begins with it, and an empty HOME. Both may be written, the set perhaps not."""
    (folder / HOME).mkdir()
    inputs = folder / WORKSPACE / task.input_subdir
    inputs.mkdir(parents=True)
    if task.input_dir is not None:
        shutil.copytree(task.input_dir, inputs, symlinks=True, dirs_exist_ok=True, copy_function=copy_file)
        for copied, _, _ in os.walk(inputs):
            allow(copied, OPEN_FOLDER)


def copy_file(source: str, target: str) -> None:
    """As `copytree` does it; nothing more is copied once the time for booting is up."""
    from_thread.check_cancelled()
    shutil.copy2(source, target)
    allow(target, OPEN_FILE | stat.S_IWUSR)
