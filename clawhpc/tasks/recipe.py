"""What an image of a task's own is built by: a recipe of Apptainer, and the folder that it copies in.

    task.def               Bootstrap and From; copies `staged` to /.clawhpc, and has the image's shell run its build.sh
    staged/build.sh        a line for each step of the Dockerfile, which says first which one it is
    staged/0, 1, …         what the steps copy

No line of a Dockerfile stands in the .def itself, where %, # and {{ }} would mean something. An image is named by what
it is made of: base, commands, content and modes of what is copied, so that tasks which agree in these share it,
whatever comments their Dockerfiles have and whatever they copy into their workspace at last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path, PurePosixPath

from clawhpc.errors import UserError
from clawhpc.tasks.dockerfile import Copy, Environment, Step
from clawhpc.tasks.faults import Fault
from clawhpc.tasks.layout import content_of, files_below

FORMAT = 1
"""Raised when the same Dockerfile gives another image."""
DIGEST_CHARS = 20
UMASK = 0o022
COPIED_MODE = 0o777 & ~UMASK
"""What of a mode is in the image."""
RECIPE, STAGED, SCRIPT, FINISH = "task.def", "staged", "build.sh", "finish.sh"
INSIDE = "/.clawhpc"
"""In the image, for whatever is ours."""
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
FAKEROOT = ("LD_PRELOAD", "LD_LIBRARY_PATH", "FAKEROOTKEY", "FAKED_MODE", "FAKEROOTDONTTRYCHOWN")
"""By which commands take themselves for root where a user has no subordinate ids."""
PASSED = (*PROXIES, *(name.upper() for name in PROXIES), *FAKEROOT, "CLAWHPC_OWNER", "SPT_NOENV")
"""Variables of the builder that its commands have: the way to a network, and by whom they are known."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of an image that says nothing of it."""
MARK = "clawhpc: line "
"""Printed before each step, with the line of the Dockerfile."""
LOCAL = "localimage"
BOOTSTRAPS = ("docker", "oras", "library", "oci", "oci-archive", "docker-archive")
AT_ONCE = 100
"""Names in one line of build.sh."""
ANY = "any"
"""Key of `tasks.bases` for what has none of its own; a `*` in its value stands for what FROM names."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """What an image is built on."""

    bootstrap: str
    place: str


def find_base(reference: str, bases: Mapping[str, str]) -> Base:
    """What `reference`, of a FROM, stands for. `bases`: see `TaskSettings`."""
    place = bases.get(reference) or bases.get(ANY, f"docker://{reference}").replace("*", reference)
    if place.startswith("/"):
        return Base(bootstrap=LOCAL, place=place)
    bootstrap, _, rest = place.partition(":")
    return Base(bootstrap=bootstrap, place=rest.removeprefix("//"))


def check_bases(bases: Mapping[str, str]) -> None:
    """ValueError for one that is neither a path nor of a registry."""
    for name, place in bases.items():
        if not place.startswith("/") and place.partition(":")[0] not in BOOTSTRAPS:
            raise ValueError(
                f"bases.{name}={place}: must be the absolute path of an image, or begin with {', '.join(BOOTSTRAPS)}:"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one image is built."""

    origin: str
    """The file that asks for it, and what faults are named by."""
    from_line: int
    base: Base
    steps: tuple[Step, ...]
    workdir: PurePosixPath
    """Of the workspace."""

    @cached_property
    def digest(self) -> str:
        """Equal for what gives equal images. Fault where a file cannot be read."""
        steps = [
            [step.script, *([copy.target, *_known_by(copy.source)] for copy in step.copies)] for step in self.steps
        ]
        known = [FORMAT, self.base.bootstrap, self.base.place, str(self.workdir), steps]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:DIGEST_CHARS]

    def write(self, folder: Path) -> Path:
        """Write it into `folder`, which is empty; the .def."""
        staged = folder / STAGED
        staged.mkdir()
        for number, copy in enumerate(self._copies):
            _stage(copy, staged / str(number))
        (staged / SCRIPT).write_text(self.script)
        recipe = folder / RECIPE
        recipe.write_text(self.definition(staged))
        return recipe

    @property
    def _copies(self) -> list[Copy]:
        return [copy for step in self.steps for copy in step.copies]

    def definition(self, staged: Path) -> str:
        """The .def. Its shell would print what it does, and the log have a proxy's password."""
        passed = " ".join(f'${{{name}+{name}="${name}"}}' for name in PASSED)
        return f"""\
Bootstrap: {self.base.bootstrap}
From: {self.base.place}

%setup
    rm -rf "${{APPTAINER_ROOTFS}}{INSIDE}"
    cp -dR --preserve=mode,timestamps {shlex.quote(str(staged))} "${{APPTAINER_ROOTFS}}{INSIDE}"

%post
    set +x
    exec env -i HOME=/root PATH={PATH} {passed} /bin/sh {INSIDE}/{SCRIPT}
"""

    @property
    def script(self) -> str:
        """What the image's own shell runs: the variables that the base has, each step, and what sandboxes need."""
        head = [
            "set -e",
            f"umask {UMASK:03o}",
            "for _of_base in /.singularity.d/env/10-docker*.sh /.singularity.d/env/90-environment.sh; do",
            '  if [ -f "$_of_base" ] && [ "$({ . "$_of_base" || :; } > /dev/null 2>&1; echo read)" = read ]; then',
            '    . "$_of_base" || :',
            "  fi",
            "done",
            "cd /",
        ]
        staged = iter(range(len(self._copies)))
        body = [line for step in self.steps for line in _lines(step, staged)]
        place = shlex.quote(str(self.workdir))
        said = (f"workdir={place}", f"passed='{' '.join(PASSED)}'")
        tail = [_marked("end"), f"mkdir -p {place}", *said, _own(FINISH)]
        return "\n".join((*head, *body, *tail))


def make_recipe(
    origin: str, made: Environment, workdir: PurePosixPath, bases: Mapping[str, str]
) -> tuple[Recipe, dict[PurePosixPath, Path]]:
    """How the image of `made` is built, and the files that need not be in it: those that the last steps copy to where
    the workspace stands, whose own they are. Other targets may be a folder by then, or a link, and are left to the
    image, which knows; and so are empty folders, for no file.
    """
    steps, rest = list(made.steps), dict[PurePosixPath, Path]()
    last_run = max((number for number, step in enumerate(steps) if step.runs), default=-1)
    for number, step in reversed(list(enumerate(steps))):
        is_near = any(path.is_relative_to(workdir) for path in (*step.targets, *step.files))
        is_certain = workdir not in step.files and all(
            PurePosixPath(copy.target) == workdir and not _has_empty(copy.source) for copy in step.copies
        )
        if number <= last_run or (is_near and not is_certain):
            break  # what it copies over what earlier lines did, would else be under it
        if is_near:
            rest = {**step.files, **rest}
            del steps[number]
    base = find_base(made.base, bases)
    if not made.base or made.base == "scratch":
        raise Fault(f"{origin}:{made.from_line}: FROM {made.base}: there are no programs to build with")
    recipe = Recipe(origin=origin, from_line=made.from_line, base=base, steps=tuple(steps), workdir=workdir)
    return recipe, rest


def _has_empty(source: Path) -> bool:
    """A folder within `source`, or it, has nothing in it."""
    return source.is_dir() and any(not folders and not names for _, folders, names in os.walk(source))


def _marked(what: str) -> str:
    """A line of its own, though what was printed before has not ended its last."""
    return f"printf '\\n%s\\n' {shlex.quote(f'{MARK}{what}')}"


def _lines(step: Step, staged: Iterator[int]) -> Iterator[str]:
    """Files are removed before they are copied: what is there may have another mode, or other names, or be a link."""
    yield _marked(f"{step.line}: {step.shown}")
    if step.script:
        yield step.script
    for copy in step.copies:
        source, target = f"{INSIDE}/{next(staged)}", shlex.quote(copy.target)
        parent = shlex.quote(copy.target if copy.target.endswith("/") else str(PurePosixPath(copy.target).parent))
        yield f"mkdir -p {parent}"
        if copy.source.is_dir():
            names = [os.path.join(copy.target, name) for name, _ in files_below(copy.source)]
            yield from (shlex.join(("rm", "-f", *names[at : at + AT_ONCE])) for at in range(0, len(names), AT_ONCE))
            yield f"cp -dR {source}/. {target}"
        else:
            name = shlex.quote(copy.source.name)
            if copy.target.endswith("/"):
                yield f"rm -f {target}{name}"
            else:
                yield f"if [ -d {target} ]; then rm -f {target}/{name}; else rm -f {target}; fi"
            yield f"cp {source}/{name} {target}"


def _stage(copy: Copy, folder: Path) -> None:
    try:
        if copy.source.is_dir():
            shutil.copytree(copy.source, folder, symlinks=True)
        else:
            folder.mkdir()
            shutil.copy2(copy.source.resolve(), folder / copy.source.name)
    except OSError as error:
        raise UserError(f"{copy.source}: cannot be copied: {error}") from error


def _known_by(source: Path) -> list[str]:
    """Names, contents and modes; not the times, which differ between two copies of a set."""
    if not source.is_dir():
        return [source.name, *_kind_of(source.resolve())]
    return [part for path in sorted(source.rglob("*")) for part in (str(path.relative_to(source)), *_kind_of(path))]


def _kind_of(path: Path) -> tuple[str, str]:
    if path.is_symlink():
        return content_of(path), ""
    what = "folder" if path.is_dir() else content_of(path)
    return what, oct(path.stat().st_mode & COPIED_MODE)


def _own(name: str) -> str:
    return resources.files("clawhpc.tasks").joinpath(name).read_text()
