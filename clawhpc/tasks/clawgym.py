"""Read tasks in the ClawGym folder format.

    <folder>/<any name>/data_entry.json         task_id, user_query; optional input_mount_dir and metadata
    <folder>/<any name>/input_files/            optional; copied to input_mount_dir: the workspace, or a folder in it
    <folder>/<any name>/reward/reward.sh        and its helpers, seen by the verifier as <workspace>/reward

Its scripts name `/root/.openclaw/workspace` outright, so the workspace stands there in every sandbox, whatever
`input_mount_dir` says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from clawhpc.errors import UserError
from clawhpc.records import WORKSPACE_MOUNT, TaskSpec

REWARD_FOLDER = "reward"
"""Below the workspace, and only in the verifier's sandbox."""


class _Fault(Exception):
    """What is wrong with one task: file, key, and what is allowed."""


class _Entry(msgspec.Struct):
    """data_entry.json. Keys that are not listed are ignored."""

    task_id: str
    user_query: str
    input_mount_dir: str | None = None
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
    faults = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        try:
            task = _load_task(Path(entry.path))
            if task.task_id in tasks:
                first = Path(tasks[task.task_id].reward_dir).parent.name
                raise _Fault(f"{entry.path}/data_entry.json: task_id {task.task_id!r} is that of {first} already")
            tasks[task.task_id] = task
        except _Fault as fault:
            faults.append(str(fault))
    if not tasks:
        detail = f"; the first of {len(faults)} faults: {faults[0]}" if faults else ""
        raise UserError(
            f"tasks: no task in {folder} (a task is a folder with data_entry.json and reward/reward.sh){detail}"
        )
    return LoadedTasks(tasks=tuple(tasks.values()), faults=tuple(faults))


def _load_task(root: Path) -> TaskSpec:
    path = root / "data_entry.json"
    entry = _read_entry(path)
    if not (root / REWARD_FOLDER / "reward.sh").is_file():
        raise _Fault(f"{root}/{REWARD_FOLDER}/reward.sh: missing")
    inputs = root / "input_files"
    return TaskSpec(
        task_id=entry.task_id,
        instruction=entry.user_query,
        input_dir=str(inputs.resolve()) if inputs.is_dir() else None,
        input_subdir=_input_subdir(path, entry.input_mount_dir, inputs),
        reward_dir=str((root / REWARD_FOLDER).resolve()),
        metadata=entry.metadata,
    )


def _read_entry(path: Path) -> _Entry:
    try:
        entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
    except OSError as error:
        raise _Fault(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Fault(f"{path}: {error}") from error
    for key in ("task_id", "user_query"):
        if not getattr(entry, key).strip():
            raise _Fault(f"{path}: {key} is empty")
    return entry


def _input_subdir(path: Path, mount: str | None, inputs: Path) -> str:
    """Where below the workspace the input files go."""
    if mount is not None and not inputs.is_dir():
        raise _Fault(f"{path}: input_mount_dir is set, but there is no folder input_files")
    target = PurePosixPath(mount or WORKSPACE_MOUNT)
    if not target.is_relative_to(WORKSPACE_MOUNT) or ".." in target.parts:
        raise _Fault(f"{path}: input_mount_dir {mount!r} is neither {WORKSPACE_MOUNT} nor a folder in it")
    subdir = target.relative_to(WORKSPACE_MOUNT)
    first_names = subdir.parts[:1] or tuple(entry.name for entry in inputs.glob(REWARD_FOLDER))
    if REWARD_FOLDER in first_names:
        raise _Fault(f"{path}: input_files would lie at {WORKSPACE_MOUNT}/{REWARD_FOLDER}, the verifier's own place")
    return str(subdir)
