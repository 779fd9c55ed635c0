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
    workspace = folder / WORKSPACE
    inputs = workspace / task.input_subdir
    inputs.mkdir(parents=True)
    if task.image is not None:
        copy_tree(in_image(Path(task.image.folder), task.workspace_mount), workspace)
        if task.input_dir is not None:
            make_way(Path(task.input_dir), inputs)
    if task.input_dir is not None:
        copy_tree(Path(task.input_dir), inputs)


def in_image(image: Path, mount: str) -> Path:
    """The folder that `image` has at `mount`. SandboxError where a link stands on the way: on the host it would lead to
    the host's files.
    """
    place = Path(image, mount.lstrip("/"))
    if place.resolve() != Path(image.resolve(), mount.lstrip("/")):
        raise SandboxError(f"{place}: a link leads there in the task's image; its workspace must be the folder itself")
    return place


def copy_tree(source: Path, target: Path) -> None:
    """All files, folders and links in `source`, into a folder that is there. Services leave pipes and sockets."""
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=special_files, copy_function=copy_file)
    for copied, _, _ in os.walk(target):
        allow(copied, OPEN_FOLDER)


def special_files(folder: str, names: list[str]) -> list[str]:
    """Those of a folder with these `names` that have no content to copy."""
    copied = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [name for name, mode in modes.items() if not any(is_it(mode) for is_it in copied)]


def make_way(source: Path, target: Path) -> None:
    """Remove from `target` the files that those of `source` replace. SandboxError where a folder of theirs is a link:
    an image's may lead anywhere on the host.
    """
    for here, folders, names in os.walk(source):
        place = target / Path(here).relative_to(source)
        if place.is_symlink():
            raise SandboxError(f"{place.relative_to(target)} of the workspace is a link in the task's image")
        links = [name for name in folders if Path(here, name).is_symlink()]
        for name in (*names, *links):
            if (place / name).is_symlink() or (place / name).is_file():
                (place / name).unlink()


def copy_file(source: str, target: str) -> None:
    """As `copytree` does it; nothing more is copied once the time for booting is up."""
    from_thread.check_cancelled()
    shutil.copy2(source, target)
    allow(target, OPEN_FILE | stat.S_IWUSR)
