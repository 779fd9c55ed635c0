"""What every format of tasks shares: faults of single tasks, which leave the others whole, and notes."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawhpc.records import TaskSpec

MAX_NESTING = 100
"""Levels of metadata: far fewer than plans and records, which hold a task, can be written and read with."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""No text: a NUL can stand in no command line, and the others steer a terminal."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""How Python reads bytes of a path that are not UTF-8; no record can be written with one."""
SET_BY_US = re.compile(r"HOME|PATH|BASH_ENV|PYTEST_ADDOPTS|PYTHONHOME|PYTHONSAFEPATH|GIT_CONFIG_.*|LD_.*")
"""Variables that a task cannot set: sandbox and verifier do, or they would change what these start with."""
VARYING = re.compile(r"^[^:]*:(?:\d+:)?|'[^']*'|\"[^\"]*\"|(?<= )/[^\s:;,]*|\d+")
"""Of a fault: the file, with the line in it; what it quotes; other paths; numbers."""


class Fault(Exception):
    """What is wrong with one task: file, key, and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class LoadedTasks:
    """The tasks of one set."""

    format: str
    tasks: tuple[TaskSpec, ...]
    """In the order of their folders, files or rows."""
    faults: tuple[str, ...]
    """One line for each that gave no task: the file, a colon, the key, and what is wrong."""
    notes: dict[str, int] = field(default_factory=dict)
    """What is done otherwise than where the format comes from -> in how many tasks."""


class Gathering:
    """Collects the tasks of one set, one after the other."""

    def __init__(self, format: str) -> None:
        self._format = format
        self._tasks: dict[str, TaskSpec] = {}
        self._names: dict[str, str] = {}
        self._faults: list[str] = []
        self._notes: Counter[str] = Counter()

    @contextmanager
    def one(self) -> Iterator[None]:
        """A fault in the block, or a file that cannot be looked at, costs this task and no other."""
        try:
            yield
        except Fault as fault:
            self._faults.append(one_line(str(fault)))
        except OSError as error:
            self._faults.append(one_line(f"{error.filename}: {error.strerror}"))

    def add(self, task: TaskSpec, name: str, key: str) -> None:
        """Take `task`, which a person knows as `name`; `key`: the file, and the key in it, that give its id."""
        if task.task_id in self._tasks:
            raise Fault(f"{key} {task.task_id!r} is that of {self._names[task.task_id]!r} already")
        self._tasks[task.task_id], self._names[task.task_id] = task, name

    def note(self, text: str) -> None:
        """Say that one more task is treated so."""
        self._notes[text] += 1

    def loaded(self) -> LoadedTasks:
        """All of them."""
        return LoadedTasks(
            format=self._format,
            tasks=tuple(self._tasks.values()),
            faults=tuple(self._faults),
            notes=dict(sorted(self._notes.items())),
        )


def by_kind(faults: Iterable[str]) -> list[list[str]]:
    """`faults`, with those together that say the same of several tasks, in the order of the first of each kind."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for fault in faults:
        kinds[VARYING.sub("", fault)].append(fault)
    return list(kinds.values())


def task_folders(folder: Path) -> list[Path]:
    """The folders in `folder` by name, without the hidden ones and those that a link does not lead to."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if os.path.isdir(entry.path) and not entry.name.startswith("."))
    return [folder / name for name in names]


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. Anything else is a fault: a pipe would be waited for."""
    real(path)
    try:
        if path.exists() and not path.is_file():
            raise Fault(f"{path}: not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise Fault(f"{path}: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The same, as text, read as Python's `read_text` would: without a byte order mark, and \\n ends a line."""
    try:
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise Fault(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from error


def real(path: Path, top: Path | None = None) -> Path:
    """`path` without links. They may lead to another place in its folder, or in `top`, by default the folder above.

    A fault otherwise: what a set brings, harnesses see, and it could bring any file of the host so.
    """
    try:
        found = path.resolve()
    except (OSError, RuntimeError) as error:
        raise Fault(f"{path}: links lead round in a circle") from error
    if not any(found.is_relative_to(folder.resolve()) for folder in (path.parent, top or path.parent.parent)):
        raise Fault(f"{path}: is a link that leads out, to {found}; copy what is there")
    return found


def parse_python(key: str, code: str) -> ast.Module:
    """`code`, which is run in a sandbox alone; a fault where it is no Python."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError) as error:
        raise Fault(f"{key}: {error}") from error
    except (RecursionError, MemoryError) as error:  # of the parser's own stack
        raise Fault(f"{key}: nested too deep") from error


def check_path(root: Path) -> None:
    """A fault where `root` has a path that no record can hold."""
    if SURROGATE.search(f"{root} {root.resolve()}"):
        raise Fault(f"{root}: its path is not UTF-8; give it another name")


def check_text(key: str, text: str, *, required: bool = True) -> None:
    """A fault where the value of `key` is no text that can be passed on."""
    if required and not text.strip():
        raise Fault(f"{key} is empty")
    if found := CONTROL.search(text):
        raise Fault(f"{key} has the control character {found[0]!r}")


def check_env(key: str, env: Mapping[str, str], *, may_set: str = "") -> None:
    """A fault for a variable that a task may not set, unless it is `may_set`, or that nobody can."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise Fault(f"{key}: the name of a variable is empty or has a =, or there is a NUL")
        if SET_BY_US.fullmatch(name) and name != may_set:
            raise Fault(f"{key}.{name}: is set by the sandbox, and cannot be changed")


def nesting(value: Any) -> int:
    """Levels of objects and arrays in a JSON value."""
    levels, layer = 0, [value]
    while containers := [item for item in layer if isinstance(item, dict | list)]:
        levels += 1
        layer = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    return levels


def one_line(text: str) -> str:
    """`text` with what a terminal does not print spelt out: a folder's name may hold line breaks and worse."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
