"""Folders of a task that its set does not hold as folders: written into the cache, once for each content.

A workspace that a Dockerfile puts together, a grader that stands in a markdown file, a row of a table: sandbox and
verifier want folders of files. All workers must see the cache, as they must for everything else in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from clawhpc.errors import UserError
from clawhpc.tasks.faults import Fault

FORMAT = 2
"""Raised when the same files give other folders."""
DIGEST_CHARS = 20
NAME_BYTES = 255
"""Of a file or folder, at most: Linux has no more."""


@dataclass(frozen=True)
class Layout:
    """Folders by their content, all below `root`."""

    root: Path

    def lay_out(self, key: str, files: Mapping[str, str | Path]) -> str:
        """The absolute path of a folder with these files: their paths in it -> a text, or a file or link of the host.

        `key`: the file, and the key in it, that ask for them. A file is known by its content, time and mode. Raises
        `Fault` for one that cannot be read, that is none, whose name none can have, or that stands where others need a
        folder; `UserError` where the cache cannot be written, or has lost some of them.
        """
        paths = [PurePath(name) for name in files]
        assert not any(path.is_absolute() or ".." in path.parts for path in paths), "they stay in the folder"
        if both := files.keys() & {str(parent) for path in paths for parent in path.parents}:
            raise Fault(f"{key}: {min(both)} is to be a file, and a folder with other files")
        _check_names(key, paths)
        folder = self.root / _digest(files)
        try:
            if not folder.is_dir():
                _write(files, folder)
        except OSError as error:
            raise UserError(f"cannot write tasks to {self.root}: {error.strerror}: {error.filename}") from error
        if lost := next((name for name in files if not os.path.lexists(folder / name)), None):
            raise UserError(
                f"{folder}/{lost} is gone, perhaps to a cleaner of old files: remove {self.root}; it is written anew"
            )
        return str(folder.absolute())


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """All files and links in `folder` and its folders: path in it, path on the host."""
    for here, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        for name in sorted((*names, *links)):
            path = Path(here, name)
            yield str(path.relative_to(folder)), path


def _check_names(key: str, paths: Iterable[PurePath]) -> None:
    for path in paths:
        try:
            possible = all(b"\0" not in part and len(part) <= NAME_BYTES for part in map(os.fsencode, path.parts))
        except UnicodeEncodeError:
            possible = False
        if not possible:
            raise Fault(f"{key}: {str(path)!r} can be no name of a file")


def _digest(files: Mapping[str, str | Path]) -> str:
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for name in sorted(files):
        content = files[name]
        known = f"text {content}" if isinstance(content, str) else _known_by(content)
        digest.update(f"{len(name)} {name} {len(known)} {known} ".encode(errors="surrogateescape"))
    return digest.hexdigest()[:DIGEST_CHARS]


def content_of(path: Path) -> str:
    """Where a link leads, or the digest of a file, whose size and time do not tell it from others: archives give theirs
    one time. Fault for what is neither, or cannot be read.
    """
    try:
        if path.is_symlink():
            return f"link {os.readlink(path)}"
        if not path.is_file():
            raise Fault(f"{path}: neither a file nor a link")
        with path.open("rb") as file:
            return f"file {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise Fault(f"{path}: {error.strerror}") from error


def _known_by(path: Path) -> str:
    content, status = content_of(path), path.lstat()
    return content if path.is_symlink() else f"{content} {status.st_mtime_ns} {status.st_mode}"


def _write(files: Mapping[str, str | Path], folder: Path) -> None:
    """Write beside `folder` and rename: whole or not at all. Who comes second finds it done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        for name, content in files.items():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                target.write_text(content)
            else:
                shutil.copy2(content, target, follow_symlinks=False)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
