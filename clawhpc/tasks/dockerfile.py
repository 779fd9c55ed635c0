"""What of a Dockerfile can be had without Docker: the folder in which work begins, its files, and variables.

Nothing is built. FROM is answered by the image that the run has; what would have to be built besides is either left to
that image, if the user says that it has it, or a fault.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from clawhpc.tasks.faults import Fault, read_text
from clawhpc.tasks.layout import files_below

WITHOUT_EFFECT = frozenset({"ARG", "CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "SHELL"})
"""Harbor starts the container with a command of its own; ports lead nowhere; a shell is that of RUN."""
LEFT_TO_THE_IMAGE = frozenset({"RUN", "VOLUME", "ENTRYPOINT", "HEALTHCHECK", "ONBUILD"})
HEREDOC = re.compile(r"(?:^|\s)\d*<<-?([\"']?)(\w+)\1(?=\s|$)")
FLAG = re.compile(r"--(\w+)(=\S+)?\s+")
ARCHIVE = re.compile(r"\.(tar|tar\.\w+|tgz|tbz2?|txz)$")
"""What ADD would unpack."""
MAX_SHOWN = 200
"""Characters of a line in a fault."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a Dockerfile, continued lines included."""

    line: int
    name: str
    """In capitals."""
    value: str


@dataclass(kw_only=True)
class Environment:
    """What the instructions so far amount to."""

    workdir: PurePosixPath | None = None
    env: dict[str, str] = field(default_factory=dict)
    files: dict[PurePosixPath, Path] = field(default_factory=dict)
    """Absolute path inside -> a file or link of the host."""
    left: list[str] = field(default_factory=list)
    """Names of instructions that the image is taken to have carried out."""


def read_dockerfile(path: Path, *, assume_image: bool) -> Environment:
    """What `path` asks for; its folder is the context. `assume_image`: what it would build, the run's image has."""
    made, num_stages = Environment(), 0
    for one in instructions(read_text(path), path):
        where = f"{path}:{one.line}: {one.name}"
        if one.name == "FROM":
            num_stages += 1
            if num_stages > 1:
                raise Fault(f"{where}: several stages are not supported")
        elif one.name in LEFT_TO_THE_IMAGE:
            if not assume_image:
                raise Fault(
                    f"{where} is not carried out here: build an image that has it, name it in sandbox.image, and set "
                    "tasks.assume_image=true"
                )
            made.left.append(one.name)
        elif one.name not in WITHOUT_EFFECT:
            _carry_out(one, made, path.parent, where)
    return made


def instructions(text: str, path: Path) -> Iterator[Instruction]:
    """Those in the `text` of `path`, without comments and heredocs."""
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line.strip()
        while whole.endswith("\\"):
            following = next(lines, (0, ""))[1].strip()
            whole = whole[:-1] + (" \\" if following.startswith("#") else f" {following}")
        for _, end in HEREDOC.findall(whole):
            if not any(line.strip() == end for _, line in lines):
                raise Fault(f"{path}:{number}: no line {end} ends its text")
        name, *value = whole.split(None, 1)
        yield Instruction(line=number, name=name.upper(), value="".join(value))


def _carry_out(one: Instruction, made: Environment, context: Path, where: str) -> None:
    if "$" in one.value:
        raise Fault(f"{where} {one.value}: variables are not put in")
    match one.name:
        case "WORKDIR":
            made.workdir = PurePosixPath(made.workdir or "/", one.value.strip("\"'"))
        case "ENV":
            made.env |= _variables(one.value, where)
        case "COPY" | "ADD":
            _copy(one, made, context, where)
        case "USER":
            if one.value not in ("root", "0", "root:root", "0:0"):
                raise Fault(f"{where} {one.value}: there is one user in a sandbox")
        case _:
            raise Fault(f"{where}: not supported")


def _variables(text: str, where: str) -> dict[str, str]:
    """`A=1 B="2 3"`, or the old form `A 1 2`."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Fault(f"{where} {text}: {error}") from error
    if words and "=" not in words[0]:
        return {words[0]: text.split(None, 1)[1] if len(words) > 1 else ""}
    if not all("=" in word for word in words):
        raise Fault(f"{where} {text}: not of the form NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _copy(one: Instruction, made: Environment, context: Path, where: str) -> None:
    words = _copy_words(one, where)
    *sources, last = words
    target = PurePosixPath(made.workdir or "/", last)
    if ".." in target.parts:
        raise Fault(f"{where} to {last}: leads upwards")
    into = last == "." or last.endswith(("/", "/.")) or len(sources) > 1 or _is_folder(target, made)
    for source in sources:
        for path in _matches(source, context, where):
            if one.name == "ADD" and ARCHIVE.search(path.name):
                raise Fault(f"{where} {source}: archives are not unpacked; unpack it, and use COPY")
            if path.is_dir():
                made.files |= {target / name: file for name, file in files_below(path)}
            else:
                made.files[target / path.name if into else target] = path.resolve()  # as Docker has it


def _copy_words(one: Instruction, where: str) -> list[str]:
    text = one.value
    while flag := FLAG.match(text):
        if flag[1] not in ("chown", "link"):
            raise Fault(f"{where} --{flag[1]}: not supported")
        text = text[flag.end() :]
    if HEREDOC.search(text):
        raise Fault(f"{where}: text in the Dockerfile itself is not supported; put it into a file")
    try:
        words = json.loads(text) if text.startswith("[") else shlex.split(text)
    except (ValueError, RecursionError) as error:
        raise Fault(f"{where} {text[:MAX_SHOWN]}: {error}") from error
    if len(words) < 2 or not all(isinstance(word, str) for word in words):
        raise Fault(f"{where} {text}: needs a source and a target")
    return words


def _is_folder(target: PurePosixPath, made: Environment) -> bool:
    """Whether it is one by now: Docker then copies into it."""
    known = [made.workdir or PurePosixPath("/"), *made.files]
    return any(target in path.parents for path in known) or target == made.workdir


def _matches(source: str, context: Path, where: str) -> list[Path]:
    """What `source` names in the context, which has no way out."""
    if "://" in source or source.startswith("git@"):
        raise Fault(f"{where} {source}: nothing is fetched from a network")
    relative = PurePosixPath(source.lstrip("/") or ".")
    if ".." in relative.parts:
        raise Fault(f"{where} {source}: leads out of {context}")
    try:
        found = sorted(context.glob(str(relative))) if re.search(r"[*?\[]", source) else [context / relative]
    except ValueError as error:
        raise Fault(f"{where} {source}: {error}") from error
    if not found or not all(path.exists() for path in found):
        raise Fault(f"{where} {source}: there is no such file in {context}")
    if not all(path.resolve().is_relative_to(context.resolve()) for path in found):
        raise Fault(f"{where} {source}: leads out of {context}")
    return found
