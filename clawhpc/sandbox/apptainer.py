"""Containers by Apptainer, the container system of clusters, without privileges."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clawhpc.sandbox.base import Mount
from clawhpc.sandbox.root import Root, kernel_settings

PREFIX = "apptainer"
"""In the cache folder: where containers/install_apptainer.sh puts one."""


@dataclass(frozen=True)
class Apptainer:
    """Writes command lines for `apptainer`, 1.2 or newer."""

    program: str
    config_dir: Path
    """A folder of ours for what Apptainer keeps in a user's home elsewhere."""
    name = "apptainer"
    remedy = (
        "If it may not make namespaces, ask your cluster; if it cannot mount a .sif, see that you may use /dev/fuse."
    )

    def environment(self, markers: dict[str, str]) -> dict[str, str]:
        """Of `apptainer` itself; its runtime drops all but what is named for the inside, where only init.py gets it."""
        inside = {f"APPTAINERENV_{name}": value for name, value in markers.items()}
        return {**markers, **inside, "APPTAINER_CONFIGDIR": str(self.config_dir)}

    def argv(self, root: Root, mounts: Sequence[Mount], inner: Sequence[str], layer: Path | None = None) -> list[str]:
        """The command line that runs `inner` on `root` with `mounts`, each after those that it lies in."""
        isolation = (
            *("--containall", "--cleanenv", "--no-home", "--no-mount", "hostfs,bind-paths,sys,cwd"),
            *("--net", "--network", "none", "--hostname", "sandbox"),
            *("--no-init", "--no-privs"),  # init.py is the first process
            *(("--userns",) if os.getuid() == 0 else ()),  # root would go without, and keep what it may do
        )
        over = () if layer is None else ("--overlay", str(layer))
        binds = [part for mount in (*kernel_settings(), *mounts) for part in ("--mount", _mount_text(mount))]
        return [self.program, "--quiet", "exec", *isolation, *over, *binds, "--pwd", "/", str(root.base), *inner]


def find_apptainer(cache_dir: Path) -> str | None:
    """The one on PATH, else one that was installed into the cache folder."""
    return shutil.which("apptainer") or shutil.which("apptainer", path=str(cache_dir / PREFIX / "bin"))


def _mount_text(mount: Mount) -> str:
    """A mount in Apptainer's notation, which is a line of CSV."""
    line = io.StringIO()
    fields = ["type=bind", f"source={mount.source}", f"destination={mount.target}", *([] if mount.writable else ["ro"])]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()
