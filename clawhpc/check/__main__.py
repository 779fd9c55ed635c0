"""Is this set of tasks sound? python -m clawhpc.check tasks=DIR [untouched=N] [json=FILE]"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anyio
import msgspec

from clawhpc.check.report import Findings, report
from clawhpc.check.survey import Untouched, shared_ids, survey_set
from clawhpc.command import EXIT_INTERRUPTED, EXIT_USER, fail, one_line_errors
from clawhpc.config import RunConfig, entry_point
from clawhpc.errors import HostError, UserError, ungrouped
from clawhpc.keys import absolute
from clawhpc.records import TaskSpec
from clawhpc.sandbox.image import is_whole
from clawhpc.tasks.faults import LoadedTasks
from clawhpc.tasks.load import read_tasks

HELP = """\
usage: python -m clawhpc.check tasks=DIR [tasks=DIR ...] [untouched=true|false|N] [json=FILE] [KEY=VALUE ...]

Say what is faulty in sets of tasks, what is in them, and what an untouched workspace earns.

  tasks=DIR        a set, in any format of docs/tasks.md; without one, tasks.folder and tasks.heldout
  untouched=N      score the untouched workspace of N tasks of each set, drawn by `seed`; true: of all; false: of none
  json=FILE        write all that was found

It takes the overrides of clawhpc.train: sandbox.*, worker.concurrency, tasks.assume_image, tasks.images, tasks.bases,
verify.judge.*, limits.*
Exit code 0 where nothing is faulty, 2 where something is, 1 where no sandbox works here.

"""
PROGRESS_S = 5.0
"""Between two lines about it."""
ALL, NONE = "true", "false"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for, beside the configuration."""

    folders: tuple[Path, ...] = ()
    most_untouched: int | None = None
    """Of each set; None: all."""
    json: Path | None = None


@one_line_errors()
def main() -> None:
    """Exit code 0 when nothing is faulty, 2 when something is."""
    asked, sys.argv[1:] = parse_arguments(sys.argv[1:])
    code = 0

    def check(config: RunConfig) -> None:
        nonlocal code
        try:
            findings = examine(config, asked)
        except KeyboardInterrupt:
            fail("interrupted; the same command begins anew", EXIT_INTERRUPTED)
        sys.stdout.writelines(f"{line}\n" for line in report(findings, config.limits))
        if asked.json is not None:
            content = {"problems": findings.problems, **msgspec.to_builtins(findings)}
            asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        code = EXIT_USER if findings.problems else 0

    entry_point(check)()
    raise SystemExit(code)


def parse_arguments(arguments: Sequence[str]) -> tuple[Asked, list[str]]:
    """What is ours, and what is left for Hydra, which shows its help after ours."""
    ours: dict[str, list[str]] = {"tasks": [], "untouched": [], "json": []}
    rest = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in ours:
            if not value:
                fail(f"{key} is empty", EXIT_USER)
            ours[key].append(value)
        else:
            rest.append(argument)
    if {"-h", "--help"}.intersection(rest):
        sys.stdout.write(HELP)
    json = Path(absolute(ours["json"][-1], "json")) if ours["json"] else None
    if json is not None and (json.is_dir() or not json.parent.is_dir()):
        fail(f"json={json}: must be a file in a folder that is there", EXIT_USER)
    asked = Asked(
        folders=tuple(Path(absolute(folder, "tasks")) for folder in ours["tasks"]),
        most_untouched=_most_untouched((ours["untouched"] or [ALL])[-1]),
        json=json,
    )
    return asked, rest


def _most_untouched(text: str) -> int | None:
    if text in (ALL, NONE):
        return None if text == ALL else 0
    if not text.isdecimal():
        fail(f"untouched={text}: must be {ALL}, {NONE}, or a number of tasks", EXIT_USER)
    return int(text)


def examine(config: RunConfig, asked: Asked) -> Findings:
    """Load the sets, count, score. UserError where there is no set, or a folder is none."""
    folders = asked.folders or configured_folders(config)
    options = config.tasks.load_options(Path(config.cache_dir))
    if options.images is not None:
        options.images.is_whole = cache(is_whole)
    sets = [read_tasks(folder, options) for folder in folders]
    surveys = tuple(survey_set(folder, loaded) for folder, loaded in zip(folders, sets, strict=True))
    started = time.monotonic()
    untouched, rubrics_not_asked = score(config, sets, asked.most_untouched)
    return Findings(
        sets=surveys,
        shared_ids=shared_ids(sets),
        untouched=tuple(untouched),
        rubrics_not_asked=rubrics_not_asked,
        untouched_s=time.monotonic() - started,
        places={
            task.task_id: place(folder, task)
            for folder, loaded in zip(folders, sets, strict=True)
            for task in loaded.tasks
        },
    )


def configured_folders(config: RunConfig) -> tuple[Path, ...]:
    """The sets of the run. UserError where it has none of its own."""
    named = [folder for folder in (config.tasks.folder, config.tasks.heldout) if folder is not None]
    if not named:
        raise UserError("no set of tasks to check: name it, tasks=DIR")
    return tuple(map(Path, named))


def place(folder: Path, task: TaskSpec) -> str:
    """Where to look when something is wrong with `task`."""
    script = task.verifier.script
    return str(folder) if script is None else f"{script.folder}/{script.script}"


def score(config: RunConfig, sets: Sequence[LoadedTasks], most: int | None) -> tuple[list[Untouched], int]:
    """What untouched workspaces earn, and how many tasks have a rubric that was not asked about."""
    drawn = draw_tasks(sets, most, config.seed)
    if not drawn:
        return [], 0
    has_judge = bool(config.verify.judge.models)
    scored = [task for task in drawn if has_judge or task.verifier.script is not None]
    silent = 0 if has_judge else sum(task.verifier.rubric is not None for task in drawn)
    try:
        return (anyio.run(score_here, config, scored) if scored else []), silent
    except HostError as error:
        raise HostError(f"{error}; untouched=false does without") from error


def draw_tasks(sets: Sequence[LoadedTasks], most: int | None, seed: int) -> list[TaskSpec]:
    """At most so many of each set, each id once."""
    drawn: dict[str, TaskSpec] = {}
    for loaded in sets:
        tasks = loaded.tasks
        some = tasks if most is None or most >= len(tasks) else random.Random(seed).sample(tasks, most)
        drawn |= {task.task_id: task for task in some}
    return list(drawn.values())


async def score_here(config: RunConfig, tasks: Sequence[TaskSpec]) -> list[Untouched]:
    """Score in a sandbox of this machine, as a worker would open it. HostError where there is none."""
    from clawhpc.check.untouched import Bench, score_untouched  # a second that --help need not spend
    from clawhpc.ledger import Ledger
    from clawhpc.sandbox.by_image import open_images
    from clawhpc.sandbox.open import open_sandbox
    from clawhpc.verify.judge import open_judge
    from clawhpc.verify.settings import judge_keys

    keys = judge_keys(config.verify.judge, os.environ)
    with ungrouped(), Ledger.open(config.scratch_root()) as ledger:
        sandbox = await open_sandbox(config.sandbox, ledger=ledger, cache_dir=Path(config.cache_dir))
        for folder in sorted({folder for task in tasks for folder in task.hidden_folders}):
            sandbox.check_hidden(Path(folder))
        async with open_judge(config.verify.judge, keys) as judge:
            bench = Bench(
                sandboxes=open_images(sandbox, config.sandbox, ledger),
                judge=judge,
                scratch=ledger.scratch,
                timeout_s=config.limits.deadline_s,
                concurrency=config.worker.concurrency,
            )
            return await score_untouched(tasks, bench, progress(len(tasks)))


def progress(total: int) -> Callable[[int], None]:
    """Says on standard error, from time to time, how far it is."""
    said_at = time.monotonic()

    def say(count: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > PROGRESS_S and count < total:
            said_at = time.monotonic()
            sys.stderr.write(f"untouched workspaces: {count} of {total} scored\n")

    return say


if __name__ == "__main__":
    main()
