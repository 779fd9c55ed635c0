"""Make a workspace safe to judge: all is open and has an end, no link leads to an answer, `reward` has its place."""

from __future__ import annotations

import os
import stat
import tempfile
from itertools import takewhile
from pathlib import Path, PurePosixPath

from clawhpc.sandbox.root import PROGRAMS
from clawhpc.tasks.clawgym import REWARD_FOLDER

OPEN_FOLDER, OPEN_FILE = stat.S_IRWXU, stat.S_IRUSR
"""What the owner of a folder or file may do at least: inside, root has no capabilities either."""
INSTALLED = (*PROGRAMS, "opt")
"""Top-level folders outside the workspace to which a link may lead: nobody inside can write there."""
MOST_HOLES_BYTES = 1 << 30
"""Of a file, what is not on disk. No answer has as much; who reads on through a terabyte of zeros never ends."""
LONGEST_PATH = 3000
"""Bytes of a folder's path on the host. The kernel takes 4096; with less, every path below it can be dealt with."""


def make_safe(workspace: Path, mount: str) -> None:
    """`workspace`, which stands at `mount` inside, has an empty `reward` to mount over; all else can be read, to its
    end, and no link in it leads to the verifier's folder, nor to any place where an answer could come to be.

    What the harness put in the place of `reward`, and folders nested deeper than any script could name them, are moved
    beside the workspace. Pipes, sockets, devices and files that are all holes are removed: an answer that cannot be
    read counts as none. No process of the harness may run any more.
    """
    workspace.chmod(OPEN_FOLDER)
    make_room(workspace)
    top, inside = str(workspace), PurePosixPath(mount)
    folders = [top]
    while folders:
        with os.scandir(folders.pop()) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_symlink():
                link = inside / entry.path[len(top) + 1 :]
                if not is_harmless(link, os.readlink(entry.path), inside):
                    os.unlink(entry.path)
            elif entry.is_file() and not _has_no_end(entry):
                _allow(entry.path, OPEN_FILE)
            elif not entry.is_dir():
                os.unlink(entry.path)
            else:
                _allow(entry.path, OPEN_FOLDER)
                if len(os.fsencode(entry.path)) > LONGEST_PATH:
                    _set_aside(Path(entry.path), workspace)
                else:
                    folders.append(entry.path)


def make_room(workspace: Path) -> None:
    """An empty `reward`. Moving what is there needs no permission for anything inside, removing it would."""
    reward = workspace / REWARD_FOLDER
    if reward.is_dir() and not reward.is_symlink():
        reward.chmod(OPEN_FOLDER)
    if os.path.lexists(reward):
        _set_aside(reward, workspace)
    reward.mkdir()


def is_harmless(link: PurePosixPath, target: str, workspace: PurePosixPath) -> bool:
    """Whether `link` leads to another place in the workspace, or to installed programs. All paths are those inside.

    Judged by its text. To follow it would tell where it leads now, and through /proc that depends on who looks, and
    when. Text is enough where `..` stands only at the start, as it then climbs real folders; from there on the way
    leads down, and through harmless links only. The workspace itself is no place to lead to: `reward` lies in it.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    num_up = len(list(takewhile("..".__eq__, parts)))
    if ".." in parts[num_up:]:
        return False
    start = ("/",) if target.startswith("/") else link.parent.parts
    place = PurePosixPath(*start[: max(1, len(start) - num_up)], *parts[num_up:])
    if workspace.is_relative_to(place) or place.is_relative_to(workspace / REWARD_FOLDER):
        return False
    return place.is_relative_to(workspace) or place.parts[1] in INSTALLED


def _has_no_end(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return status.st_size - 512 * status.st_blocks > MOST_HOLES_BYTES


def _allow(path: str, bits: int) -> None:
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & bits != bits:
        os.chmod(path, mode | bits)


def _set_aside(path: Path, workspace: Path) -> None:
    path.rename(Path(tempfile.mkdtemp(prefix="planted-", dir=workspace.parent)) / path.name)
