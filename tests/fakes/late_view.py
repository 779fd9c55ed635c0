"""A shared file system: this host sees late what others have written, and naming a file may take long."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class LateView:
    """Files that `is_foreign` are not there for the first `num_looks` looks at each.

    As on NFS, whose clients keep what they know of a name: a link to a name that is taken fails on the server all the
    same, and a file that was written here is seen here.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_foreign: Callable[[Path], bool], *, num_looks: int) -> None:
        self._is_foreign = is_foreign
        self._num_looks = num_looks
        self.looks: Counter[Path] = Counter()
        for name in ("exists", "is_dir"):
            monkeypatch.setattr(Path, name, self._looking(getattr(Path, name)))
        for name in ("read_bytes", "read_text"):
            monkeypatch.setattr(Path, name, self._reading(getattr(Path, name)))
        glob = Path.glob
        monkeypatch.setattr(Path, "glob", lambda path, pattern: (one for one in glob(path, pattern) if self._sees(one)))

    def _sees(self, path: Path) -> bool:
        if not os.path.lexists(path) or not self._is_foreign(path):
            return True
        self.looks[path] += 1
        return self.looks[path] > self._num_looks

    def _looking(self, real: Callable[..., bool]) -> Callable[..., bool]:
        return lambda path: self._sees(path) and real(path)

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Path, *arguments: Any, **options: Any) -> Any:
            if not self._sees(path):
                raise FileNotFoundError(str(path))
            return real(path, *arguments, **options)

        return read


def naming_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The thread of each link and rename from now on: it waits for the server."""
    threads: list[threading.Thread] = []
    for owner, name in ((os, "link"), (Path, "replace")):
        real = getattr(owner, name)

        def noted(*arguments: Any, real: Callable[..., Any] = real) -> Any:
            threads.append(threading.current_thread())
            return real(*arguments)

        monkeypatch.setattr(owner, name, noted)
    return threads
