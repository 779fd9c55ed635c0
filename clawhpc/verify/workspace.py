"""Make a workspace safe to judge: all is open and has an end, no link leads to an answer, the verifier has room."""

from __future__ import annotations

import os
import stat
import tempfile
from itertools import takewhile
from pathlib import Path, PurePosixPath

from clawhpc.sandbox.root import PROGRAMS

OPEN_FOLDER, OPEN_FILE = stat.S_IRWXU, stat.S_IRUSR
"""What the owner of a folder or file may do at least: inside, root has no capabilities either."""
INSTALLED = (*PROGRAMS, "opt")
"""Top-level folders outside the workspace to which a link may lead: nobody inside can write there."""
LAID_OVER = tuple(map(PurePosixPath, ("/tmp", "/var/tmp", "/root", "/logs", "/proc", "/dev", "/run", "/sys")))
"""Where a sandbox shows something else than its image has."""
MOST_HOLES_BYTES = 1 << 30
"""Of a file, what is not on disk. No answer has as much; who reads on through a terabyte of zeros never ends."""
LONGEST_PATH = 3000
"""Bytes of a folder's path on the host. The kernel takes 4096; with less, every path below it can be dealt with."""


def make_safe(workspace: Path, mount: str, check_mount: str | None = None, image: Path | None = None) -> None:
    """`workspace`, which stands at `mount` inside, has an empty folder to mount over where the verifier's own folder
    will stand, if that is at `check_mount` in it; all else can be read, to its end, and no link leads to the verifier's
    folder, nor to any place where an answer could come to be. A link of the task's `image` may lead to what else is in
    that.

    What the harness put in that place, and folders nested deeper than any script could name them, are moved beside the
    workspace. Pipes, sockets, devices and files that are all holes are removed: an answer that cannot be read counts as
    none. No process of the harness may run any more.
    """
    top, inside = str(workspace), PurePosixPath(mount)
    hidden = PurePosixPath(check_mount) if check_mount is not None else None
    workspace.chmod(OPEN_FOLDER)
    if hidden is not None and hidden.is_relative_to(inside):
        make_room(workspace / hidden.relative_to(inside))
    folders = [top]
    while folders:
        with os.scandir(folders.pop()) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_symlink():
                link = inside / entry.path[len(top) + 1 :]
                text = os.readlink(entry.path)
                if not is_harmless(link, text, inside, hidden) and not (
                    is_of(image, link, text) and leads_into_image(link, text, inside, hidden)
                ):
                    os.unlink(entry.path)
            elif entry.is_file() and not _has_no_end(entry):
                allow(entry.path, OPEN_FILE)
            elif not entry.is_dir():
                os.unlink(entry.path)
            else:
                allow(entry.path, OPEN_FOLDER)
                if len(os.fsencode(entry.path)) > LONGEST_PATH:
                    _set_aside(Path(entry.path), workspace)
                else:
                    folders.append(entry.path)


def make_room(place: Path) -> None:
    """An empty folder at `place`, in a workspace. Moving what is there needs no permission for anything inside,
    removing it would.
    """
    if place.is_dir() and not place.is_symlink():
        place.chmod(OPEN_FOLDER)
    if os.path.lexists(place):
        _set_aside(place, place.parent)
    place.mkdir()


def is_harmless(link: PurePosixPath, target: str, workspace: PurePosixPath, hidden: PurePosixPath | None) -> bool:
    """Whether `link` leads to another place in the workspace, or to installed programs, and not to `hidden`, the
    verifier's folder. All paths are those inside.

    Judged by its text. To follow it would tell where it leads now, and through /proc that depends on who looks, and
    when. Text is enough where `..` stands only at the start, as it then climbs real folders; from there on the way
    leads down, and through harmless links only. The workspace itself is no place to lead to: `hidden` may lie in it.
    """
    place = _place_of(link, target)
    if place is None or workspace.is_relative_to(place) or (hidden is not None and place.is_relative_to(hidden)):
        return False
    return place.is_relative_to(workspace) or place.parts[1] in INSTALLED


def is_of(image: Path | None, link: PurePosixPath, target: str) -> bool:
    """Whether `image` has this very `link` there, so that a rollout began with it, whoever may have made it again."""
    if image is None:
        return False
    top = image.resolve()
    place = top / str(link).lstrip("/")
    return place.parent.resolve() == place.parent and place.is_symlink() and os.readlink(place) == target


def leads_into_image(link: PurePosixPath, target: str, workspace: PurePosixPath, hidden: PurePosixPath | None) -> bool:
    """Whether `link` leads to a place that comes from the image, so that nobody inside has written there, and not to
    one that holds or is `hidden`, or one that is not the image's; or to the workspace itself, where `hidden` is not in
    it. Judged by its text, as `is_harmless` does.
    """
    place = _place_of(link, target)
    if place == workspace:
        return hidden is None or not hidden.is_relative_to(workspace)
    others = [*LAID_OVER, *([] if hidden is None else [hidden]), workspace]
    return place is not None and not any(place.is_relative_to(one) or one.is_relative_to(place) for one in others)


def _place_of(link: PurePosixPath, target: str) -> PurePosixPath | None:
    """Where `link` leads by its text; None where that does not tell."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    num_up = len(list(takewhile("..".__eq__, parts)))
    if ".." in parts[num_up:]:
        return None
    start = ("/",) if target.startswith("/") else link.parent.parts
    return PurePosixPath(*start[: max(1, len(start) - num_up)], *parts[num_up:])


def _has_no_end(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return status.st_size - 512 * status.st_blocks > MOST_HOLES_BYTES


def allow(path: str, bits: int) -> None:
    """Its owner may do at least what `bits` say; links are not looked at."""
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & bits != bits:
        os.chmod(path, mode | bits)


def _set_aside(path: Path, workspace: Path) -> None:
    path.rename(Path(tempfile.mkdtemp(prefix="planted-", dir=workspace.parent)) / path.name)
