"""Read tasks in the format of JobBench: a folder for each occupation, with numbered tasks.

    <folder>/<occupation>/task<N>/RUBRICS.json                          what a judge is asked, weighted
    <folder>/<occupation>/task<N>/task_folder/TASK_INSTRUCTIONS.txt     what the harness is told
    <folder>/<occupation>/task<N>/task_folder/…                         copied into the workspace, the instructions too
    <folder>/<occupation>/task<N>/task_card.md                          for people; not read
    <folder>/<occupation>/task<N>/files_required_to_search/             a fault: there is no web to find them on

As the data set is published, `<folder>` is its `dataset` or `dataset_easy`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from clawhpc.records import Criterion, Rubric, TaskSpec, Verifier
from clawhpc.tasks.faults import (
    Fault,
    Gathering,
    LoadedTasks,
    check_path,
    check_text,
    read_bytes,
    read_text,
    real,
    task_folders,
)

NUMBERED = re.compile(r"task[0-9]+")
RUBRICS, INPUTS, INSTRUCTIONS, SEARCHED = (
    "RUBRICS.json",
    "task_folder",
    "TASK_INSTRUCTIONS.txt",
    "files_required_to_search",
)
ALL_OR_NOTHING = "Score 1 where all of these hold, and 0 where any of them does not:"
"""A rubric is met or not met."""


class _Rubric(msgspec.Struct):
    rubric: str
    weight: float
    criterion: list[str] = []


class _Rubrics(msgspec.Struct):
    """RUBRICS.json, which has either name."""

    rubrics: list[_Rubric] = []
    evaluation_rubrics: list[_Rubric] = []


def load_tasks(folder: Path) -> LoadedTasks:
    """Every sound task in `folder`, and a fault for every other."""
    found = Gathering("JobBench")
    for root in numbered_folders(folder):
        with found.one():
            found.add(_load_task(root), f"{root.parent.name}/{root.name}", f"{root}: the task's name")
    return found.loaded()


def numbered_folders(folder: Path) -> Iterator[Path]:
    """The folders of tasks, by occupation and number."""
    for occupation in task_folders(folder):
        numbered = (root for root in task_folders(occupation) if NUMBERED.fullmatch(root.name))
        yield from sorted(numbered, key=lambda root: int(root.name.removeprefix("task")))


def _load_task(root: Path) -> TaskSpec:
    check_path(root)
    if (root / SEARCHED).is_dir():
        raise Fault(f"{root}/{SEARCHED}: to be found on the web, which a sandbox has not; move the files to {INPUTS}")
    path = root / INPUTS / INSTRUCTIONS
    instruction = read_text(path)
    check_text(f"{path}: the instruction", instruction)
    return TaskSpec(
        task_id=f"{root.parent.name}__{root.name}",
        instruction=instruction,
        input_dir=str(real(root / INPUTS)),
        verifier=Verifier(rubric=_read_rubric(root / RUBRICS)),
        metadata={"occupation": root.parent.name},
    )


def _read_rubric(path: Path) -> Rubric:
    try:
        found = msgspec.json.decode(read_bytes(path), type=_Rubrics)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Fault(f"{path}: {error}") from error
    rubrics = found.rubrics or found.evaluation_rubrics
    if not rubrics:
        raise Fault(f"{path}: rubrics is empty")
    return Rubric(criteria=tuple(_criterion(path, index, rubric) for index, rubric in enumerate(rubrics)))


def _criterion(path: Path, index: int, rubric: _Rubric) -> Criterion:
    key = f"{path}: rubrics[{index}]"
    check_text(f"{key}.rubric", rubric.rubric)
    if not 0 < rubric.weight < float("inf"):
        raise Fault(f"{key}.weight {rubric.weight:g}: must be more than 0")
    points = "".join(f"\n- {point}" for point in rubric.criterion or [rubric.rubric])
    return Criterion(
        name=f"rubric {index + 1}", text=f"{rubric.rubric}\n{ALL_OR_NOTHING}{points}", weight=rubric.weight
    )
