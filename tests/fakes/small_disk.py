"""A real disk that is full, or may not be written: a small tmpfs in a mount namespace of its own.

`python -m tests.fakes.small_disk NAME FOLDER SIZE` runs the scenario NAME with such a disk mounted on FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOUNT = 'mount -t tmpfs -o "size=$2" disk "$1" && shift 2 && exec "$@"'


def on_small_disk(folder: Path, module: str, scenario: str, *, size: str) -> subprocess.CompletedProcess[str]:
    """Run a scenario of `module`, with a disk of `size` mounted on `folder`, which nobody else sees."""
    program = (sys.executable, "-m", module, scenario, str(folder))
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", MOUNT, "sh", str(folder), size, *program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )


@dataclass(frozen=True)
class SmallDisk:
    """The disk on which a scenario runs."""

    folder: Path

    @property
    def _ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Nothing, or no more than this, can be written any more."""
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        os.truncate(self._ballast, max(0, self._ballast.stat().st_size - leave_bytes))

    def mend(self) -> None:
        """There is room again, and it may be written."""
        if os.statvfs(self.folder).f_flag & os.ST_RDONLY:
            _run("umount", "--lazy", str(self.folder))
        self._ballast.unlink(missing_ok=True)

    def protect(self) -> None:
        """It may not be written, but for what is open: as when the server of a file system protects it."""
        _run("mount", "--bind", str(self.folder), str(self.folder))
        _run("mount", "-o", "remount,bind,ro", str(self.folder))

    def files(self) -> dict[str, bytes]:
        """What it holds, but for the ballast."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and path != self._ballast
        }

    @contextmanager
    def broken(self, how: str) -> Iterator[None]:
        """`full` or `read-only`, and mended afterwards."""
        {"full": self.fill, "read-only": self.protect}[how]()
        try:
            yield
        finally:
            self.mend()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def run_scenario(scenarios: dict[str, Callable[[SmallDisk], None]]) -> None:
    """What a module that is run by `on_small_disk` does."""
    scenarios[sys.argv[1]](SmallDisk(Path(sys.argv[2])))
