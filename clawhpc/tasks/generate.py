"""Write small tasks as ClawGym folders: a train and a held-out split that share no instruction."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

from clawhpc.errors import UserError, at_least
from clawhpc.lock import alone
from clawhpc.records import WORKSPACE_MOUNT
from clawhpc.tasks.families import FAMILIES, SmallTask, Split, draw_task

REWARD_SCRIPT = """\
#!/bin/sh
# 1 when the workspace holds exactly what expected/ holds, byte for byte; else 0.
here=$(dirname "$0")
diff -r -q --no-dereference -x reward "$here/.." "$here/expected" >/dev/null
case $? in 0) echo 1 ;; 1) echo 0 ;; *) exit 2 ;; esac
"""
FORMAT = 1
"""Raised when the same settings give other files: with a change to a family, or to the script."""
WRITE_S = 300.0
"""For another process to write the same tasks: some small files, perhaps over the network."""
MAX_DRAWS_PER_TASK = 1000
"""So many draws without a new instruction mean that the family has no more of them."""


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Which small tasks to make."""

    families: tuple[str, ...] = ("create", "append", "count", "relay")
    """Of `tasks.families`; the tasks are dealt out among them in turn."""
    num_train: int = 512
    num_heldout: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.families or not FAMILIES.keys() >= set(self.families):
            raise ValueError(f"families={list(self.families)}: allowed are {', '.join(FAMILIES)}")
        at_least(self, num_train=1, num_heldout=0, seed=0)


@dataclass(frozen=True)
class GeneratedTasks:
    """Where the two splits lie: each a folder for `load_tasks`."""

    root: Path

    @property
    def settings(self) -> Path:
        """The settings that made this folder; written last."""
        return self.root / "generated.json"

    def split(self, split: Split) -> Path:
        """The tasks of one split."""
        return self.root / split


def generate_tasks(settings: GenerateSettings, folder: Path) -> GeneratedTasks:
    """The tasks of `settings` in `folder`: written whole or not at all, and left alone when they are there already.

    Raises `UserError` when `folder` holds something else or cannot be written, or when a family has too few distinct
    instructions.
    """
    tasks = GeneratedTasks(folder)
    stamp = msgspec.json.encode({"format": FORMAT, "settings": settings})
    if _made_by(stamp, tasks):
        return tasks
    try:
        with alone(folder.with_name(f".{folder.name}.lock"), folder, wait_s=WRITE_S):
            if not _made_by(stamp, tasks):  # else another process has just made the same
                _write_new(settings, stamp, tasks)
    except OSError as error:
        raise UserError(f"cannot write tasks to {folder}: {error.strerror}") from error
    return tasks


def _made_by(stamp: bytes, tasks: GeneratedTasks) -> bool:
    return tasks.settings.is_file() and tasks.settings.read_bytes() == stamp


def _write_new(settings: GenerateSettings, stamp: bytes, tasks: GeneratedTasks) -> None:
    folder = tasks.root
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} holds something other than the tasks of these settings: remove it, or name another folder"
        )
    partial = GeneratedTasks(folder.with_name(f".{folder.name}.partial"))
    shutil.rmtree(partial.root, ignore_errors=True)
    _write_splits(settings, partial)
    partial.settings.write_bytes(stamp)
    partial.root.rename(folder)


def _write_splits(settings: GenerateSettings, tasks: GeneratedTasks) -> None:
    counts: dict[Split, int] = {"train": settings.num_train, "heldout": settings.num_heldout}
    for split, num_tasks in counts.items():
        tasks.split(split).mkdir(parents=True)
        for index, task in enumerate(draw_tasks(settings, split, num_tasks)):
            write_task(task, f"{split}-{index:05d}-{task.family}", tasks.split(split))


def draw_tasks(settings: GenerateSettings, split: Split, num_tasks: int) -> list[SmallTask]:
    """`num_tasks` tasks with different instructions, the families in turn; the same for the same settings."""
    rng = random.Random(f"{settings.seed} {split}")
    tasks: dict[str, SmallTask] = {}
    while len(tasks) < num_tasks:
        task = _draw_new(settings.families[len(tasks) % len(settings.families)], rng, split, tasks)
        tasks[task.instruction] = task
    return list(tasks.values())


def _draw_new(family: str, rng: random.Random, split: Split, known: dict[str, SmallTask]) -> SmallTask:
    for _ in range(MAX_DRAWS_PER_TASK):
        task = draw_task(family, rng, split)
        if task.instruction not in known:
            return task
    raise UserError(
        f"the family {family!r} has too few {split} instructions for num_{split}: lower it, or add families"
    )


def write_task(task: SmallTask, task_id: str, folder: Path) -> None:
    """One task as a ClawGym folder `folder/task_id`."""
    root = folder / task_id
    entry = {
        "task_id": task_id,
        "user_query": task.instruction,
        "metadata": {"family": task.family, "slots": task.slots},
    }
    if task.inputs:
        entry["input_mount_dir"] = WORKSPACE_MOUNT
        _write_files(task.inputs, root / "input_files")
    _write_files(task.expected, root / "reward" / "expected")
    (root / "reward" / "reward.sh").write_text(REWARD_SCRIPT)
    (root / "data_entry.json").write_bytes(msgspec.json.format(msgspec.json.encode(entry)))


def _write_files(files: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_text(content)
