"""Read tasks in the ClawGym folder format.

    <folder>/<any name>/data_entry.json         task_id, user_query; optional input_mount_dir, mcp_servers, metadata
    <folder>/<any name>/input_files/            optional; copied to input_mount_dir: the workspace, or a folder in it
    <folder>/<any name>/reward/reward.sh        and its helpers, seen by the verifier as <workspace>/reward
    <folder>/<any name>/mcp/                    optional; programs of mcp_servers, seen by the harness as /mcp

Its scripts name `/root/.openclaw/workspace` outright, so the workspace stands there in every sandbox, whatever
`input_mount_dir` says.

`mcp_servers`, which is ours, lists programs that speak the Model Context Protocol over stdin and stdout:

    "mcp_servers": [{"name": "lab", "command": ["python3", "/mcp/server.py"], "env": {"ROUNDS": "3"}}]

The harness starts them in its sandbox, with the workspace as current directory. `mcp/` is read-only there, no part of
the workspace and not seen by the verifier. Of other programs they find what the sandbox has, such as /usr/bin/python3.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from clawhpc.errors import UserError
from clawhpc.records import WORKSPACE_MOUNT, McpServer, ScriptCheck, TaskSpec, Verifier

MCP_FOLDER = "mcp"
REWARD_FOLDER = "reward"
"""Below the workspace, and only in the verifier's sandbox."""
MAX_NESTING = 100
"""Levels of metadata: far fewer than plans and records, which hold a task, can be written and read with."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""No text: a NUL can stand in no command line, and the others steer a terminal."""
SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""Becomes part of the names of its tools, for which providers allow these characters, and 64 of them in all."""
EXPANDED = re.compile(r"\$[A-Za-z_{]|\{(?:env|file):")
"""What some harness puts something else for: a variable, or a file. Others leave it as it is."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""How Python reads bytes of a path that are not UTF-8; no record can be written with one."""


class _Fault(Exception):
    """What is wrong with one task: file, key, and what is allowed."""


class _McpEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One of mcp_servers. A key that is not listed is an error: nobody else reads these."""

    name: str
    command: list[str]
    env: dict[str, str] = {}


class _Entry(msgspec.Struct):
    """data_entry.json. Keys that are not listed are ignored."""

    task_id: str
    user_query: str
    input_mount_dir: str | None = None
    mcp_servers: list[_McpEntry] = []
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class LoadedTasks:
    """The tasks of one folder."""

    tasks: tuple[TaskSpec, ...]
    """By folder name. At least one."""
    faults: tuple[str, ...]
    """One line for each folder that gave no task: the file, the key, and what is wrong."""


def load_tasks(folder: Path) -> LoadedTasks:
    """Every sound task below `folder`, and a fault for every other. Raises `UserError` when there is no sound one."""
    if not folder.is_dir():
        raise UserError(f"tasks: {folder} is not a folder")
    tasks: dict[str, TaskSpec] = {}
    folders: dict[str, str] = {}
    faults = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        try:
            task = _load_task(Path(entry.path))
            if task.task_id in tasks:
                raise _Fault(
                    f"{entry.path}/data_entry.json: task_id {task.task_id!r} is that of {folders[task.task_id]} already"
                )
            tasks[task.task_id], folders[task.task_id] = task, entry.name
        except _Fault as fault:
            faults.append(_one_line(str(fault)))
    if not tasks:
        detail = f"; the first of {len(faults)} faults: {faults[0]}" if faults else ""
        raise UserError(
            f"tasks: no task in {folder} (a task is a folder with data_entry.json and reward/reward.sh){detail}"
        )
    return LoadedTasks(tasks=tuple(tasks.values()), faults=tuple(faults))


def _load_task(root: Path) -> TaskSpec:
    if SURROGATE.search(str(root.resolve())):
        raise _Fault(f"{root}: its path is not UTF-8; give it another name")
    path = root / "data_entry.json"
    entry = _read_entry(path)
    if not (root / REWARD_FOLDER / "reward.sh").is_file():
        raise _Fault(f"{root}/{REWARD_FOLDER}/reward.sh: missing")
    inputs, programs = root / "input_files", root / MCP_FOLDER
    return TaskSpec(
        task_id=entry.task_id,
        instruction=entry.user_query,
        input_dir=str(inputs.resolve()) if inputs.is_dir() else None,
        input_subdir=_input_subdir(path, entry.input_mount_dir, inputs),
        verifier=Verifier(script=ScriptCheck(folder=str((root / REWARD_FOLDER).resolve()))),
        mcp_servers=_mcp_servers(path, entry.mcp_servers),
        mcp_dir=str(programs.resolve()) if programs.is_dir() else None,
        metadata=entry.metadata,
    )


def _read_entry(path: Path) -> _Entry:
    too_deep = f"{path}: nested more than {MAX_NESTING} levels deep"
    try:
        if path.exists() and not path.is_file():
            raise _Fault(f"{path}: not a regular file")  # a pipe would be waited for
        entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
    except OSError as error:
        raise _Fault(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Fault(f"{path}: {error}") from error
    except RecursionError as error:
        raise _Fault(too_deep) from error
    if _nesting(entry.metadata) > MAX_NESTING:
        raise _Fault(too_deep)
    for key in ("task_id", "user_query"):
        if not getattr(entry, key).strip():
            raise _Fault(f"{path}: {key} is empty")
    for key in ("task_id", "user_query", "input_mount_dir"):
        if found := CONTROL.search(getattr(entry, key) or ""):
            raise _Fault(f"{path}: {key} has the control character {found[0]!r}")
    return entry


def _mcp_servers(path: Path, entries: list[_McpEntry]) -> tuple[McpServer, ...]:
    names = [entry.name for entry in entries]
    for index, entry in enumerate(entries):
        key = f"{path}: mcp_servers[{index}]"
        if not SERVER_NAME.fullmatch(entry.name):
            raise _Fault(f"{key}.name {entry.name!r}: must be letters, digits, _ and -, 32 at most")
        if entry.name in names[:index]:
            raise _Fault(f"{key}.name {entry.name!r} is that of another already")
        if not entry.command or not entry.command[0]:
            raise _Fault(f"{key}.command is empty")
        if any("\0" in text for text in (*entry.command, *entry.env, *entry.env.values())):
            raise _Fault(f"{key} has a NUL")
        if found := next(filter(None, map(EXPANDED.search, (*entry.command, *entry.env.values()))), None):
            raise _Fault(f"{key} has {found[0]!r}: harnesses would expand it; put it into a file of {MCP_FOLDER}/")
        if any(not name or "=" in name for name in entry.env):
            raise _Fault(f"{key}.env: the name of a variable is empty or has a =")
    return tuple(McpServer(name=entry.name, argv=tuple(entry.command), env=entry.env) for entry in entries)


def _nesting(value: Any) -> int:
    """Levels of objects and arrays in a JSON value."""
    levels, layer = 0, [value]
    while containers := [item for item in layer if isinstance(item, dict | list)]:
        levels += 1
        layer = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    return levels


def _input_subdir(path: Path, mount: str | None, inputs: Path) -> str:
    """Where below the workspace the input files go."""
    target = PurePosixPath(mount or WORKSPACE_MOUNT)
    if not target.is_relative_to(WORKSPACE_MOUNT) or ".." in target.parts:
        raise _Fault(f"{path}: input_mount_dir {mount!r} is neither {WORKSPACE_MOUNT} nor a folder in it")
    if mount is not None and not inputs.is_dir():
        raise _Fault(f"{path}: input_mount_dir is set, but there is no folder input_files")
    subdir = target.relative_to(WORKSPACE_MOUNT)
    first_names = subdir.parts[:1] or tuple(entry.name for entry in inputs.glob(REWARD_FOLDER))
    if REWARD_FOLDER in first_names:
        raise _Fault(f"{path}: input_files would lie at {WORKSPACE_MOUNT}/{REWARD_FOLDER}, the verifier's own place")
    return str(subdir)


def _one_line(text: str) -> str:
    """`text` with what a terminal does not print spelt out: a folder's name may hold line breaks and worse."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
