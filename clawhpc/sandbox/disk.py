"""What kind of file system a folder lies on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "afs", "9p", "virtiofs", "wekafs", "panfs", "fuse")
"""How the kinds of file systems begin that other hosts may see too."""


@dataclass(frozen=True)
class Place:
    """What a folder lies on."""

    kind: str
    """Of its file system, as the kernel names it."""
    options: tuple[str, ...] = ()
    """With which it is mounted."""

    @property
    def is_network(self) -> bool:
        """Other hosts may see it."""
        return self.kind.startswith(NETWORK)


def place_of(folder: Path, mounts: str) -> Place:
    """What `folder`, absolute, lies on, by the text of /proc/self/mounts: of the last of the nearest mounts."""
    found, depth = Place("unknown"), 0
    for point, kind, options in (line.split(" ")[1:4] for line in mounts.splitlines()):
        path = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point))
        if folder.is_relative_to(path) and len(path.parts) >= depth:
            found, depth = Place(kind, tuple(options.split(","))), len(path.parts)
    return found
