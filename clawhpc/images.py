"""Build the images that tasks have of their own: python -m clawhpc.images tasks.folder=SET tasks.images=FOLDER"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.command import EXIT_MACHINE, EXIT_USER, fail, one_line_errors
from clawhpc.config import RunConfig, entry_point
from clawhpc.errors import UserError, ungrouped
from clawhpc.ledger import Ledger
from clawhpc.sandbox.apptainer import find_apptainer
from clawhpc.sandbox.image import Build, BuildError, build_once, is_whole
from clawhpc.tasks.faults import by_kind
from clawhpc.tasks.harbor import NOT_BUILT
from clawhpc.tasks.images import TaskImages
from clawhpc.tasks.load import read_tasks
from clawhpc.tasks.recipe import LOCAL, MARK, PASSED, Recipe

HELP = """\
usage: python -m clawhpc.images tasks.folder=SET tasks.images=FOLDER [at_once=N] [KEY=VALUE ...]

Build the images that tasks of Harbor have of their own, those that are missing. Run it where there is a network.

  tasks.folder=SET      the tasks; those of tasks.heldout and evaluate.sets too
  tasks.images=FOLDER   takes the images; all hosts must see it
  tasks.bases={...}     what a FROM stands for: docs/tasks.md
  at_once=N             builds at a time, 2 by default

Exit code 0 where all images are there, 1 where one could not be built, 2 where there is nothing to build from.

"""
AT_ONCE = 2
"""Builds: they wait for the network, and then for the disk."""
LOG_LINES = 12
"""Of a build that has failed, shown."""
SHOWN = 3
"""Files with the same recipe that are named."""
MARKED = re.compile(rf"^{MARK}(\d+|end):? ?(.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An image that could not be built."""

    recipes: Sequence[Recipe]
    why: str
    log: Path | None
    """What this build has printed; None where it did not begin."""


@one_line_errors()
def main() -> None:
    """Exit code 0 when all images are there."""
    at_once, sys.argv[1:] = parse_arguments(sys.argv[1:])
    code = 0

    def build(config: RunConfig) -> None:
        nonlocal code
        code = build_images(config, at_once)

    entry_point(build)()
    raise SystemExit(code)


def parse_arguments(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """How many builds at a time, and what is left for Hydra, which shows its help after ours."""
    ours = [argument for argument in arguments if argument.startswith("at_once=")]
    rest = [argument for argument in arguments if argument not in ours]
    if {"-h", "--help"}.intersection(rest):
        sys.stdout.write(HELP)
    text = ours[-1].partition("=")[2] if ours else str(AT_ONCE)
    if not text.isdecimal() or int(text) < 1:
        fail(f"at_once={text}: must be a number of builds, at least 1", EXIT_USER)
    return int(text), rest


def build_images(config: RunConfig, at_once: int) -> int:
    """Build what is missing, say what could not be built; the exit code."""
    options = config.tasks.load_options(Path(config.cache_dir))
    if options.images is None:
        raise UserError("tasks.images is null: name the folder that takes the images")
    folders = set_folders(config)
    for folder in folders:
        read_tasks(folder, options)
    wanted = dict(options.images.wanted)
    say(f"{sum(map(len, wanted.values()))} tasks have an image of their own, {len(wanted)} images in all")
    with Ledger.open(config.scratch_root()) as ledger:
        failures = anyio.run(build_all, options.images, config, ledger, at_once)
    for failure in failures:
        sys.stdout.writelines(f"{line}\n" for line in failure_lines(failure))
    faults = [fault for folder in folders for fault in read_tasks(folder, options).faults if NOT_BUILT not in fault]
    for first, *alike in by_kind(faults):
        say(f"left out: {first}" + (f" (and {len(alike)} tasks like it)" if alike else ""))
    say(f"{len(wanted) - len(failures)} of {len(wanted)} images are in {options.images.folder}")
    return EXIT_MACHINE if failures else 0


def set_folders(config: RunConfig) -> list[Path]:
    """The sets of the run. UserError where it has none of its own."""
    named = [config.tasks.folder, config.tasks.heldout, *config.evaluate.sets.values()]
    folders = [Path(folder) for folder in dict.fromkeys(named) if folder is not None]
    if not folders:
        raise UserError("no set of tasks: name it, tasks.folder=SET")
    return folders


async def build_all(images: TaskImages, config: RunConfig, ledger: Ledger, at_once: int) -> list[Failure]:
    """Build so many at a time; what fails leaves the others alone."""
    apptainer = find_apptainer(Path(config.cache_dir))
    if apptainer is None:
        raise UserError("Apptainer is not installed, which builds images; ask your cluster for it")
    images.folder.mkdir(parents=True, exist_ok=True)
    slots = anyio.CapacityLimiter(at_once)
    failures: list[Failure] = []
    num_done = 0

    async def build(recipes: list[Recipe]) -> None:
        nonlocal num_done
        async with slots:
            place = images.place(recipes[0])
            failure = await to_thread.run_sync(build_one, recipes, place, apptainer, ledger, abandon_on_cancel=True)
        num_done += 1
        if failure is not None:
            failures.append(failure)
        say(f"{num_done} of {len(images.wanted)}: {place.name} {'is there' if failure is None else 'failed'}")

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for recipes in list(images.wanted.values()):
                tasks.start_soon(build, recipes)
    return failures


def build_one(recipes: Sequence[Recipe], image: Path, apptainer: str, ledger: Ledger) -> Failure | None:
    """Why it could not be built; None where it is there."""
    if is_whole(image):
        return None
    recipe = recipes[0]
    say(f"building {image.name}, of {recipe.origin}")
    local = recipe.base.bootstrap == LOCAL
    try:
        with tempfile.TemporaryDirectory(prefix="recipe-", dir=ledger.scratch) as folder:
            build = Build(
                recipe=recipe.write(Path(folder)),
                image=image,
                apptainer=apptainer,
                is_local=local,
                arguments=() if local else ("--fix-perms",),
                environment={name: os.environ[name] for name in PASSED if name in os.environ},
                log=log_of(image),
            )
            build_once(build, ledger)
    except BuildError as error:
        return Failure(recipes=recipes, why=error.why, log=log_of(image))
    except (UserError, OSError) as error:
        return Failure(recipes=recipes, why=str(error).partition("\n")[0], log=None)
    return None


def failure_lines(failure: Failure) -> Iterator[str]:
    """Which task, which line of its Dockerfile and the end of the log where it came so far, and whom it concerns
    besides.
    """
    first, *others = failure.recipes
    yield ""
    if failure.log is None:
        yield f"{first.origin}: {failure.why}"
    else:
        printed = failure.log.read_text(errors="replace")
        begun = MARKED.findall(printed)
        line, step = begun[-1] if begun else (str(first.from_line), f"FROM: {first.base.bootstrap} {first.base.place}")
        yield f"{first.origin}{f':{line}: {step}' if line != 'end' else ': what a sandbox needs is not there'}"
        yield f"    {failure.why}"
        yield from (f"    {text}" for text in printed.splitlines()[-LOG_LINES:])
        yield f"    the whole log: {failure.log}"
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        yield f"    the same image: {', '.join(one.origin for one in others[:SHOWN])}{more}"


def log_of(image: Path) -> Path:
    """All that its last build has printed."""
    return image.with_name(f"{image.name}.log")


def say(line: str) -> None:
    """At once: a build takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
