"""The file system that a container stands on: the host's own programs, or an image. No container changes it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from clawhpc.records import SANDBOX_HOME
from clawhpc.sandbox.base import Mount

PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Top-level folders of a Linux with its programs and libraries; on most, all but /usr are links into it."""
SETTINGS = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
"""Of the host's /etc, what its programs need in order to start. No account, key, certificate or resolver."""
MOUNT_POINTS = ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "tmp", "var/tmp")
PYTHON = "/usr/bin/python3"
OWN_PYTHON = "/run/clawhpc/python"
OLDEST_PYTHON = (3, 9)
"""That init.py can be read by."""
PYTHON_S = 20.0
"""For an interpreter to say its version; it may come over the network."""
KERNEL_SETTINGS = ("sys", "irq", "bus", "sysrq-trigger")
"""In /proc: what a real root may write even without a capability."""


@dataclass(frozen=True, kw_only=True)
class Root:
    """A root file system."""

    base: Path
    """Its top: a folder, or for Apptainer a .sif file."""
    mounts: tuple[Mount, ...]
    """What is laid over it."""
    python: str
    """An interpreter inside, for init.py."""
    writable: bool = False
    """Each container has a layer over it that it can write."""

    def shows(self, path: Path) -> Path | None:
        """The folder of the host by which whoever stands on this root can read `path`; None if there is none."""
        folders = (self.base, *(mount.source for mount in self.mounts))
        return next((folder for folder in folders if path.resolve().is_relative_to(folder.resolve())), None)


def host_root(folder: Path, *, python: str = PYTHON) -> Root:
    """The host's programs, read-only, below a nearly empty top that is made in `folder`. Needs no image.

    Its interpreter is the host's `python` if that is new enough, else the one that runs us, brought in.
    """
    for name in MOUNT_POINTS:
        (folder / name).mkdir(parents=True)
    mounts = []
    for name in PROGRAMS:
        host = Path("/", name)
        if host.is_symlink():
            (folder / name).symlink_to(host.readlink())
        elif host.is_dir():
            (folder / name).mkdir()
            mounts.append(Mount(source=host, target=f"/{name}"))
    for name in SETTINGS:
        host = Path("/etc", name)
        if host.exists():
            _make_mount_point(folder / "etc" / name, host)
            mounts.append(Mount(source=host.resolve(), target=f"/etc/{name}"))
    (folder / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (folder / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    mounts += _accounts(folder / "etc")
    if not _is_new_enough(python):
        mounts.append(Mount(source=Path(sys.base_prefix), target=OWN_PYTHON))
        python = f"{OWN_PYTHON}/bin/python3.{sys.version_info.minor}"
    return Root(base=folder, mounts=tuple(mounts), python=python)


def image_root(image: Path, folder: Path, *, python: str = PYTHON, writable: bool = False) -> Root:
    """An image with `python`, its module `ctypes` included; `folder` takes its list of accounts."""
    return Root(base=image, mounts=_accounts(folder), python=python, writable=writable)


def kernel_settings() -> tuple[Mount, ...]:
    """KERNEL_SETTINGS read-only, those that this kernel has, to be laid over /proc."""
    paths = (Path("/proc", name) for name in KERNEL_SETTINGS)
    return tuple(Mount(source=path, target=str(path)) for path in paths if path.exists())


def _accounts(folder: Path) -> tuple[Mount, ...]:
    """Accounts for root and whoever runs us, both at home in /root: programs ask who they are."""
    folder.mkdir(parents=True, exist_ok=True)
    users = {os.getuid(): ("user", os.getgid()), 0: ("root", 0)}
    lines = (f"{name}:x:{uid}:{gid}::{SANDBOX_HOME}:/bin/bash\n" for uid, (name, gid) in users.items())
    (folder / "passwd").write_text("".join(lines))
    (folder / "group").write_text(
        "".join(f"{name}:x:{gid}:\n" for gid, name in {os.getgid(): "user", 0: "root"}.items())
    )
    return tuple(Mount(source=folder / name, target=f"/etc/{name}") for name in ("passwd", "group"))


def _make_mount_point(path: Path, like: Path) -> None:
    if like.is_dir():
        path.mkdir()
    else:
        path.touch()


def _is_new_enough(python: str) -> bool:
    """False also for one that is missing, broken, or hangs."""
    check = f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    try:
        return subprocess.run([python, "-I", "-S", "-c", check], timeout=PYTHON_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
