"""An image on this host's own disk: hundreds of containers that start from a shared one would ask its servers for every
page and every name.

    shared:     image, a file or a folder
    scratch:    OWNER/images/NAME     whole, or not there; the copy of each further owner on this host is made of links

A copy lies in the scratch of its owner, and goes with it: there is nothing else to be removed by anybody. With the last
of the owners its bytes go too.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawhpc.errors import SandboxError
from clawhpc.ledger import Ledger, remove_tree
from clawhpc.sandbox.disk import place_of

log = logging.getLogger(__name__)

STAGED = "images"
"""In an owner's scratch: its copies."""
STAGE_S = 600.0
"""For one copy, and for another process on this host to make one."""
POLL_S = 0.1
"""Between two tries for the lock: flock(2) itself would wait without a deadline."""
SPARE_BYTES = 1 << 30
"""That must stay free on the host's disk."""


def stage_image(image: Path, ledger: Ledger) -> Path:
    """A whole copy of `image` on this host's disk; or `image`, where no copy can be made, which is logged.

    It is copied over the network once per host, whichever processes ask at the same time. Each compares what it has
    with the original, which the host's memory still holds then.
    """
    root = ledger.scratch.parent
    try:
        copy = ledger.scratch / STAGED / _copy_name(image)
    except OSError as error:
        return _unstaged(image, error)
    if copy.exists():
        return copy
    partial = copy.with_name(f"{copy.name}.partial")
    copy.parent.mkdir(exist_ok=True)
    try:
        with _alone_on(root):
            others = [path for path in root.glob(f"*/{STAGED}/{copy.name}") if path != copy]
            if not any(_copy(other, partial, image, ledger, by_links=True) for other in others):
                _check_room(image, root)
                if not _copy(image, partial, image, ledger, by_links=False):
                    raise SandboxError("the copy differs from it")
            partial.rename(copy)
    except (OSError, SandboxError) as error:
        remove_tree(partial)
        return _unstaged(image, error)
    return copy


def _unstaged(image: Path, error: Exception) -> Path:
    log.warning("%s: used where it lies, not from this host's disk: %s", image, error)
    return image


def is_far(image: Path, scratch: Path, mounts: str) -> bool:
    """`image` lies on a file system that hosts share, and `scratch` does not. `mounts`: of /proc/self/mounts."""
    far, near = (place_of(path.resolve(), mounts).is_network for path in (image, scratch))
    return far and not near


def fingerprint(image: Path) -> str:
    """What tells a whole copy from another: a file's digest; of a folder how many entries and bytes there are in it."""
    if image.is_file():
        with image.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    num_entries = num_bytes = 0
    folders = [str(image)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                num_entries += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    num_bytes += entry.stat(follow_symlinks=False).st_size
    return f"{num_entries} {num_bytes}"


def _copy_name(image: Path) -> str:
    """Another one for every image, and for what the same path becomes later."""
    status = image.stat()
    identity = f"{image.resolve()} {status.st_size} {status.st_mtime_ns}"
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{image.name}"


def _copy(source: Path, target: Path, image: Path, ledger: Ledger, *, by_links: bool) -> bool:
    """Copy `source`; whether `target` is then what `image` is. A source may be going away meanwhile, with its owner."""
    remove_tree(target)
    command = ["cp", "-a", *(["-l"] if by_links else []), str(source), str(target)]
    environment = {**os.environ, **ledger.environment}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STAGE_S
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"a copy takes more than {STAGE_S:.0f} s") from error
    if done.returncode and not by_links:
        raise SandboxError(done.stderr.strip()[-400:])
    return done.returncode == 0 and fingerprint(target) == fingerprint(image)


def _check_room(image: Path, root: Path) -> None:
    """SandboxError where the copy would leave less than SPARE_BYTES."""
    size = image.stat().st_size if image.is_file() else int(fingerprint(image).split()[1])
    free = shutil.disk_usage(root).free
    if free < size + SPARE_BYTES:
        raise SandboxError(f"{root} has {free >> 20} MiB free, and the copy takes {size >> 20}")


@contextmanager
def _alone_on(folder: Path) -> Iterator[None]:
    """Nobody else on this host is in such a block with `folder`, which is itself the lock: no file is left of it."""
    lock, until = os.open(folder, os.O_RDONLY), time.monotonic() + STAGE_S
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise SandboxError(f"another process has been making a copy for {STAGE_S:.0f} s") from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(lock)
