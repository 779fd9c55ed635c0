"""The two task sets of a run: what it trains on, and what it is evaluated on."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from clawhpc.errors import UserError
from clawhpc.records import TaskSpec
from clawhpc.tasks.faults import by_kind
from clawhpc.tasks.generate import REWARD_SCRIPT, GenerateSettings, draw_tasks, generate_tasks
from clawhpc.tasks.images import TaskImages
from clawhpc.tasks.load import LoadOptions, load_tasks
from clawhpc.tasks.mix import Mix
from clawhpc.tasks.recipe import check_bases
from clawhpc.tasks.servers import McpSettings, equip

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Which tasks there are."""

    folder: str | None = None
    """Folder of tasks to train on, in any format of docs/tasks.md; None for generated tasks."""
    heldout: str | None = None
    """The same to evaluate on, none of whose tasks is in `folder`; None with `folder`: nothing is evaluated."""
    assume_image: bool = False
    """What a task would install (RUN in its Dockerfile, apt-get in its test script) is in `sandbox.image`, or among the
    host's own programs. Otherwise such a task is faulty. It brings nothing into workspaces."""
    images: str | None = None
    """Folder of images that tasks have of their own, each built from its task's Dockerfile by `python -m
    clawhpc.images`. None: no task has one."""
    bases: dict[str, str] = field(default_factory=dict)
    """What a FROM names -> what is taken for it: the absolute path of an image, or docker://HOST/NAME and the like.
    Under `any`: for all others; a `*` in it stands for what FROM names."""
    mcp: McpSettings = field(default_factory=McpSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)
    mix: Mix = "turns"
    """How the groups of a step are shared out among several harnesses: `turns`, `each`, `one`."""
    turns: dict[str, int] = field(default_factory=dict)
    """For `mix=turns`: harness -> how many turns it takes to another's one, its share of the groups; 1 by default."""

    def __post_init__(self) -> None:
        for name, count in self.turns.items():
            if count < 1:
                raise ValueError(f"turns.{name}={count}: must be at least 1")
        check_bases(self.bases)

    def load_options(self, cache_dir: Path) -> LoadOptions:
        """For loaders."""
        images = TaskImages(folder=Path(self.images), bases=self.bases) if self.images is not None else None
        return LoadOptions(cache_dir=cache_dir, assume_image=self.assume_image, images=images)


@dataclass(frozen=True, kw_only=True)
class TaskSets:
    """Tasks to train on, and tasks to evaluate on; no task is in both."""

    train: tuple[TaskSpec, ...]
    heldout: tuple[TaskSpec, ...]


def load_task_sets(settings: TaskSettings, cache_dir: Path) -> TaskSets:
    """Load, or generate into the cache. A faulty task is named in the log and left out. UserError when none is left."""
    load = partial(_load, options=settings.load_options(cache_dir), mcp=settings.mcp)
    if settings.folder is None:
        if settings.heldout is not None:
            raise UserError("tasks.heldout: needs tasks.folder too; to evaluate on one set of tasks, name it there")
        generated = generate_tasks(settings.generate, cache_dir / "tasks" / digest_tasks(settings.generate))
        heldout = load(generated.split("heldout")) if settings.generate.num_heldout else ()
        return TaskSets(train=load(generated.split("train")), heldout=heldout)
    sets = TaskSets(
        train=load(Path(settings.folder)),
        heldout=load(Path(settings.heldout)) if settings.heldout else (),
    )
    shared = {task.task_id for task in sets.train} & {task.task_id for task in sets.heldout}
    if shared:
        raise UserError(
            f"tasks.heldout={settings.heldout}: {len(shared)} tasks are in tasks.folder too, e.g. {min(shared)}"
        )
    return sets


def digest_tasks(settings: GenerateSettings) -> str:
    """Names the tasks by what they are: other families, after an update too, are other tasks."""
    drawn = (draw_tasks(settings, "train", settings.num_train), draw_tasks(settings, "heldout", settings.num_heldout))
    return hashlib.sha256(msgspec.json.encode((settings, REWARD_SCRIPT, drawn))).hexdigest()[:12]


def _load(folder: Path, *, options: LoadOptions, mcp: McpSettings) -> tuple[TaskSpec, ...]:
    loaded = load_tasks(folder, options)
    for first, *alike in by_kind(loaded.faults):
        others = f" (and {len(alike)} tasks like it: python -m clawhpc.check tasks={folder})" if alike else ""
        log.warning("task left out: %s%s", first, others)
    for note, num_tasks in loaded.notes.items():
        log.info("%d tasks of %s: %s", num_tasks, folder, note)
    return equip(loaded.tasks, mcp)
