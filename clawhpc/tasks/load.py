"""Read a set of tasks, whichever of the known formats it is in."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.tasks import clawgym, harbor, jobbench, officeqa, pinchbench
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.images import TaskImages
from clawhpc.tasks.layout import Layout

LAID_OUT = Path("tasks", "laid_out")
"""In the cache."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What loaders of some formats need."""

    cache_dir: Path
    """Takes the folders of tasks whose set has none."""
    assume_image: bool = False
    """See `TaskSettings`."""
    images: TaskImages | None = None
    """Of tasks that want one of their own; None: they have none."""

    @property
    def layout(self) -> Layout:
        """Folders in the cache."""
        return Layout(self.cache_dir / LAID_OUT)


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to write down tasks."""

    name: str
    sign: str
    """What a set of it has, for a person."""
    is_in: Callable[[Path], bool]
    """Whether a folder is a set of it; looks no further than it must."""
    load: Callable[[Path, LoadOptions], LoadedTasks]


def _has(name: str) -> Callable[[Path], bool]:
    """Whether some folder in a folder has a file of that name."""

    def is_in(folder: Path) -> bool:
        with os.scandir(folder) as entries:
            return any(os.path.isfile(f"{entry.path}/{name}") for entry in entries if not entry.name.startswith("."))

    return is_in


FORMATS = (
    Format(
        name="ClawGym",
        sign=f"*/{clawgym.ENTRY}",
        is_in=_has(clawgym.ENTRY),
        load=lambda folder, options: clawgym.load_tasks(folder),
    ),
    Format(
        name="Harbor",
        sign=f"*/{harbor.CONFIG}",
        is_in=_has(harbor.CONFIG),
        load=lambda folder, options: harbor.load_tasks(
            folder, options.layout, assume_image=options.assume_image, images=options.images
        ),
    ),
    Format(
        name="PinchBench",
        sign=pinchbench.PATTERN,
        is_in=lambda folder: bool(pinchbench.task_files(folder)),
        load=lambda folder, options: pinchbench.load_tasks(folder, options.layout),
    ),
    Format(
        name="JobBench",
        sign=f"*/task*/{jobbench.RUBRICS}",
        is_in=lambda folder: any((root / jobbench.RUBRICS).is_file() for root in jobbench.numbered_folders(folder)),
        load=lambda folder, options: jobbench.load_tasks(folder),
    ),
    Format(
        name="OfficeQA",
        sign=f"*.csv with {', '.join(officeqa.COLUMNS)}",
        is_in=lambda folder: bool(officeqa.tables(folder)),
        load=lambda folder, options: officeqa.load_tasks(folder, options.layout),
    ),
)


def read_tasks(folder: Path, options: LoadOptions) -> LoadedTasks:
    """The tasks in `folder`, and its faults, in the one format that it has signs of.

    Raises `UserError` where it is no folder, has signs of no format, or of several.
    """
    if not folder.is_dir():
        raise UserError(f"tasks: {folder} is not a folder")
    formats = [format for format in FORMATS if format.is_in(folder)]
    if not formats:
        known = "; ".join(f"{format.name}: {format.sign}" for format in FORMATS)
        raise UserError(f"tasks: no task in {folder}, in no known format ({known})")
    if len(formats) > 1:
        names = " and ".join(f"{format.name} ({format.sign})" for format in formats)
        raise UserError(f"tasks: {folder} has tasks of {names}: give each a folder of its own")
    return formats[0].load(folder, options)


def load_tasks(folder: Path, options: LoadOptions) -> LoadedTasks:
    """The same, with a `UserError` where no task is sound."""
    loaded = read_tasks(folder, options)
    if not loaded.tasks:
        first = f"; the first of {len(loaded.faults)} faults: {loaded.faults[0]}" if loaded.faults else ""
        raise UserError(f"tasks: no sound task in {folder} ({loaded.format}){first}")
    return loaded
