"""What is in a set of tasks, counted. Reads folders, starts nothing."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from clawhpc.records import TaskSpec
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.layout import files_below


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of some numbers, at least one."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Survey:
    """One set."""

    folder: str
    format: str
    num_tasks: int
    """Sound ones."""
    faults: tuple[str, ...]
    """A line for each task that cannot be used: file, key, what is wrong."""
    notes: Mapping[str, int]
    """What is done otherwise than where the format comes from -> in how many tasks."""
    verifiers: Mapping[str, int]
    """`script`, `rubric`, `script and rubric` -> how many tasks."""
    with_inputs: int
    input_files: int
    input_bytes: int
    """Of all workspaces together."""
    with_image: int
    """Tasks that have an image of their own."""
    num_images: int
    """Of those, different ones."""
    with_mcp: int
    with_mcp_host: int
    """Tasks that would start servers on the host."""
    instruction_chars: Spread | None
    run_s: Spread | None
    """What tasks say that a harness may take; None where none says anything."""
    duplicates: tuple[tuple[str, ...], ...]
    """Ids of tasks that ask the same of the same workspace."""


@dataclass(frozen=True, kw_only=True)
class Untouched:
    """What nothing earns in one task."""

    task_id: str
    reward: float | None
    """None where its verifier failed."""
    verify_s: float = 0.0
    """That its verifier took, with as many at once as in a worker; 0 where it failed."""
    breakdown: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    """Of its verifier, or of the sandbox."""
    lacking: tuple[str, ...] = ()
    """What its verifier did not find here, by what it printed; it may have said 0 for that and nothing else."""


@dataclass(frozen=True)
class _Inputs:
    files: tuple[tuple[str, int], ...]
    """Path below the workspace, bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.files)


def survey_set(folder: Path, loaded: LoadedTasks) -> Survey:
    """Count what is in the set that was loaded from `folder`."""
    tasks = loaded.tasks
    inputs = _inputs(tasks)
    return Survey(
        folder=str(folder),
        format=loaded.format,
        num_tasks=len(tasks),
        faults=loaded.faults,
        notes=loaded.notes,
        verifiers=dict(Counter(map(verifier_kind, tasks))),
        with_inputs=sum(task.input_dir is not None for task in tasks),
        input_files=sum(len(one.files) for one in inputs.values()),
        input_bytes=sum(one.num_bytes for one in inputs.values()),
        with_image=sum(task.image is not None for task in tasks),
        num_images=len({task.image for task in tasks if task.image is not None}),
        with_mcp=sum(bool(task.mcp_servers) for task in tasks),
        with_mcp_host=sum(any(server.on_host for server in task.mcp_servers) for task in tasks),
        instruction_chars=spread([len(task.instruction) for task in tasks]),
        run_s=spread([task.run_s for task in tasks if task.run_s is not None]),
        duplicates=_duplicates(tasks, inputs),
    )


def verifier_kind(task: TaskSpec) -> str:
    """By what it is scored."""
    parts = {"script": task.verifier.script, "rubric": task.verifier.rubric}
    return " and ".join(name for name, part in parts.items() if part is not None)


def shared_ids(sets: Sequence[LoadedTasks]) -> tuple[str, ...]:
    """Ids that are in several sets: a task to train on must not be one to evaluate on."""
    counts = Counter(task.task_id for one in sets for task in one.tasks)
    return tuple(sorted(task_id for task_id, count in counts.items() if count > 1))


def spread(numbers: Sequence[float]) -> Spread | None:
    """None of no numbers."""
    return Spread(least=min(numbers), median=median(numbers), most=max(numbers)) if numbers else None


def _inputs(tasks: Iterable[TaskSpec]) -> dict[str, _Inputs]:
    """By task; folders that several tasks have are read once."""
    by_folder = {folder: _list_files(folder) for folder in {task.input_dir for task in tasks} if folder is not None}
    empty = _Inputs(())
    return {task.task_id: by_folder[task.input_dir] if task.input_dir else empty for task in tasks}


def _list_files(folder: str) -> _Inputs:
    return _Inputs(tuple(sorted((name, os.lstat(path).st_size) for name, path in files_below(Path(folder)))))


def _duplicates(tasks: Iterable[TaskSpec], inputs: Mapping[str, _Inputs]) -> tuple[tuple[str, ...], ...]:
    """Two inputs are taken for the same by the names and sizes of their files."""
    same: dict[object, list[str]] = defaultdict(list)
    for task in tasks:
        same[task.instruction, task.image, task.input_subdir, inputs[task.task_id].files].append(task.task_id)
    return tuple(tuple(ids) for ids in same.values() if len(ids) > 1)
