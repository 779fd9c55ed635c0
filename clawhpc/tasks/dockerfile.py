"""What a Dockerfile asks for: the folder in which work begins, its files, variables, and the steps to an image.

Nothing is built here. Without Docker its files and variables can be had; what would have to be built besides is either
a step of an image of the task's own (recipe.py), or left to the image of the run, if the user says that it has it, or a
fault. Our own reader: spython's knows neither heredocs nor SHELL nor which line it is in.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from clawhpc.tasks.faults import Fault, read_text
from clawhpc.tasks.layout import files_below
from clawhpc.tasks.lines import HEREDOC, MAX_SHOWN, Instruction, instructions, json_words, split_flags
from clawhpc.tasks.words import Word, in_shell, literal, split_words, whole_word

WITHOUT_EFFECT = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
"""Harbor starts the container with a command of its own; ports lead nowhere."""
LEFT_TO_THE_IMAGE = frozenset({"RUN", "VOLUME", "ENTRYPOINT", "HEALTHCHECK", "ONBUILD"})
BUILT = frozenset({"RUN", "VOLUME"})
"""Of those, what an image of the task's own has; a volume is a folder of it."""
OF_BUILDS = frozenset({"ARG", "FROM", "SHELL"})
"""What matters to nothing else, but for what refers to it."""
OF_WORKDIR = frozenset({"ARG", "ENV", "WORKDIR"})
"""What says where work begins."""
WHOLE_HEREDOC = re.compile(r"<<(-?)([\"']?)\w+\2")
CACHE = re.compile(r"=(\S*,)?type=cache(,\S*)?")
"""A mount that only makes a build faster."""
ARCHIVE = re.compile(r"\.(tar|tar\.\w+|tgz|tbz2?|txz)$")
"""What ADD would unpack."""
PLAIN = re.compile(r"(docker\.io/)?(library/)?(debian|ubuntu)([:@].*)?")
"""Bases that a task names for want of another: the image of the run does as well. Work begins in / there."""
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Of a variable in a shell."""
MACHINE = platform.machine()
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(MACHINE, MACHINE)
OF_PLATFORM = {"PLATFORM": f"linux/{ARCHITECTURE}", "OS": "linux", "ARCH": ARCHITECTURE, "VARIANT": ""}
PLATFORMS: dict[str, str | None] = {
    f"{which}{key}": value for which in ("TARGET", "BUILD") for key, value in OF_PLATFORM.items()
}
"""Arguments that Docker gives to whoever declares them."""
SHELL = ("/bin/sh", "-c")
OWN_INTERPRETER = 'f=$(mktemp) && printf %s "$0" > "$f" && chmod +x "$f" && "$f" && rm "$f"'
"""Runs a text that names its interpreter in its first line."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One file, or all that is in a folder."""

    source: Path
    """Of the host."""
    target: str
    """Absolute, in the image. What ends with / is a folder; any other may be found to be one."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One instruction, as an image is built by it."""

    line: int
    shown: str
    """For a person."""
    script: str = ""
    """For a shell that keeps its variables and its folder for the steps to come."""
    copies: tuple[Copy, ...] = ()
    files: Mapping[PurePosixPath, Path] = field(default_factory=dict)
    """What these come to, as far as it is known without the image."""
    runs: bool = False
    """It does more than to copy, or to set what a sandbox sets too: an image is wanted for it."""

    @property
    def targets(self) -> list[PurePosixPath]:
        """Of what it copies, empty folders too."""
        return [PurePosixPath(copy.target) for copy in self.copies]


@dataclass(kw_only=True)
class Environment:
    """What the instructions so far amount to."""

    base: str = ""
    """What FROM names."""
    from_line: int = 1
    workdir: PurePosixPath | None = None
    env: dict[str, str] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    """Variables that ENV sets and whose value the image alone knows, as its base has a part in it."""
    files: dict[PurePosixPath, Path] = field(default_factory=dict)
    """Absolute path inside -> a file or link of the host."""
    left: list[str] = field(default_factory=list)
    """Names of instructions that the image is taken to have carried out."""
    steps: list[Step] = field(default_factory=list)


def read_dockerfile(path: Path, *, assume_image: bool = False, builds: bool = False) -> Environment:
    """What `path` asks for; its folder is the context.

    `builds`: an image of its own is built by its steps. `assume_image`: what is not built, the run's image has.
    """
    reader = _Reader(path.parent, builds)
    for one in instructions(read_text(path), path):
        where = f"{path}:{one.line}: {one.name}"
        if one.name in LEFT_TO_THE_IMAGE and not (builds and one.name in BUILT):
            if not assume_image:
                instead = "an image of its own does not do that either" if builds else "set tasks.images"
                raise Fault(
                    f"{where} is not carried out here: {instead}, or build an image that has it, name it in "
                    "sandbox.image, and set tasks.assume_image=true"
                )
            reader.made.left.append(one.name)
        elif one.name not in WITHOUT_EFFECT:
            reader.read(one, where)
    return reader.made


def read_workdir(path: Path) -> PurePosixPath | None:
    """The last WORKDIR of `path`, whatever else it asks for."""
    reader = _Reader(path.parent, builds=True)
    for one in instructions(read_text(path), path):
        if one.name in OF_WORKDIR:
            with nullcontext() if one.name == "WORKDIR" else suppress(Fault):  # it may not need that variable
                reader.read(one, f"{path}:{one.line}: {one.name}")
    return reader.made.workdir


class _Reader:
    """Carries out one instruction after the other, on paper."""

    def __init__(self, context: Path, builds: bool) -> None:
        self.made = Environment()
        self._context, self._builds = context, builds
        self._shell: tuple[str, ...] = SHELL
        self._variables = dict(PLATFORMS)
        """Of ARG and ENV; None: the image alone knows the value."""
        self._args: dict[str, str | None] = {}
        """Of ARG, seen by RUN; None: a variable of the build has the value."""
        self._odd: dict[str, str] = {}
        """Of ENV, with names that no shell has for a variable."""
        self._num_stages = 0
        self._global_args = dict(PLATFORMS)
        """Of ARG before FROM, and Docker's own."""

    def read(self, one: Instruction, where: str) -> None:
        """Fault for what cannot be had."""
        self._num_stages += one.name == "FROM"
        if self._num_stages > 1:
            raise Fault(f"{where}: several stages are not supported")
        try:
            self._carry_out(one, where)
        except Fault:
            if self._builds or one.name not in OF_BUILDS:
                raise

    def _carry_out(self, one: Instruction, where: str) -> None:
        match one.name:
            case "FROM":
                self._from(one, where)
            case "ARG":
                self._arg(one, where)
            case "WORKDIR":
                self._workdir(one, where)
            case "ENV":
                self._env(one, where)
            case "COPY" | "ADD":
                self._copy(one, where)
            case "RUN":
                self._step(one, script=self._run(one, where), runs=True)
            case "SHELL":
                self._shell = tuple(json_words(one.value, where))
            case "USER":
                self._user(one, where)
            case "VOLUME":
                self._volume(one, where)
            case _:
                raise Fault(f"{where}: not supported")

    def _step(self, one: Instruction, script: str = "", **fields: object) -> None:
        shown = " ".join(f"{one.name} {one.value}".split())[:MAX_SHOWN]
        self.made.steps.append(Step(line=one.line, shown=shown, script=script, **fields))  # type: ignore[arg-type]

    def _from(self, one: Instruction, where: str) -> None:
        """Of what is not set, nothing is put in: no image is there yet that could have set it."""
        _, text = split_flags(one.value, where, allowed={"platform"})
        word = self._whole(text.split()[0] if text else "", where, unset="")
        self._global_args, self._args, self._variables = PLATFORMS | self._args, {}, {}
        self.made.base, self.made.from_line = _text(word, where, one.value), one.line
        if not self.made.base:
            raise Fault(f"{where}: names no image")

    def _arg(self, one: Instruction, where: str) -> None:
        for word in self._words(one.value, where):
            if has_value := "=" in (literal(word[:1]) or ""):
                name, given = _pair(word, where, one.value)
                value = literal(given)
                if value is None:
                    if not NAME.fullmatch(name):
                        raise Fault(f"{where} {one.value}: variables are not put in")
                    self._step(one, script=self._assignment(name, given))
            else:
                name, known = _text(word, where, one.value), self._args | self._global_args
                has_value, value = name in known, known.get(name, "")
            if has_value:
                self._args[name] = value
            if name not in self.made.env.keys() | self.made.unread:
                self._variables[name] = value

    def _assignment(self, name: str, given: Word) -> str:
        """Of a variable of the build, which no variable of the image gives way to."""
        if name in self.made.env.keys() | self.made.unread:
            return ""
        is_ours = name in self._args
        return f"{name}={in_shell(given)}" if is_ours else f'[ -n "${{{name}+x}}" ] || {name}={in_shell(given)}'

    def _workdir(self, one: Instruction, where: str) -> None:
        self.made.workdir = self._place(self._literal(one.value, where), where)
        folder = shlex.quote(str(self.made.workdir))
        self._step(one, script=f"mkdir -p {folder}\ncd {folder}")

    def _volume(self, one: Instruction, where: str) -> None:
        """A folder, for a volume begins with what the image has there."""
        if one.value.startswith("["):
            words = [self._whole(word, where) for word in json_words(one.value, where)]
        else:
            words = self._words(one.value, where)
        folders = [str(PurePosixPath("/", _text(word, where, one.value))) for word in words]
        self._step(one, script=shlex.join(("mkdir", "-p", "/", *folders)), runs=True)

    def _user(self, one: Instruction, where: str) -> None:
        if self._literal(one.value, where) not in ("root", "0", "root:root", "0:0"):
            raise Fault(f"{where} {one.value}: there is one user in a sandbox")

    def _env(self, one: Instruction, where: str) -> None:
        """`A=1 B="2 3"`, or the old form `A 1 2`. All see the values from before the line."""
        words = self._words(one.value, where)
        first = literal(words[0][:1]) if words else ""
        if words and "=" not in (first or ""):
            name, *rest = one.value.split(None, 1)
            pairs = {name: self._whole("".join(rest), where)}
        else:
            pairs = dict(_pair(word, where, one.value) for word in words)
        for name, word in pairs.items():
            self._variables[name] = value = literal(word)
            if value is None and not (self._builds and NAME.fullmatch(name)):
                raise Fault(f"{where} {one.value}: variables are not put in")
            self.made.env.pop(name, None)
            self.made.unread.discard(name)
            if value is None:
                self.made.unread.add(name)
            else:
                self.made.env[name] = value
                self._odd |= {} if NAME.fullmatch(name) else {name: value}
        exported = [f"{name}={in_shell(word)}" for name, word in pairs.items() if name not in self._odd]
        self._step(one, script=" ".join(("export", *exported)) if exported else "")

    def _run(self, one: Instruction, where: str) -> str:
        flags, text = split_flags(one.value, where, allowed={"mount", "network"})
        for name, value in flags:
            if not (CACHE.fullmatch(value) if name == "mount" else value == "=default"):
                raise Fault(f"{where} --{name}{value}: not supported")
        argv = [*self._shell, text + (f"\n{one.text}" if one.text else "")]
        if text.startswith("["):
            with suppress(Fault):  # Docker, too, takes it for a command line then
                argv = json_words(text, where)
        elif whole := WHOLE_HEREDOC.fullmatch(text):
            lines = one.text.splitlines(keepends=True)[:-1]
            body = "".join(line.lstrip("\t") if whole[1] else line for line in lines)
            argv = [*SHELL, OWN_INTERPRETER, body] if body.startswith("#!") else [*self._shell, body]
        set_by_env = self.made.env.keys() | self.made.unread
        args = {name: value for name, value in self._args.items() if name not in set_by_env} | self._odd
        given = [
            f'{name}="${{{name}-}}"' if value is None else shlex.quote(f"{name}={value}")
            for name, value in args.items()
        ]
        return " ".join(("env", *given, shlex.join(argv)))

    def _copy(self, one: Instruction, where: str) -> None:
        _, text = split_flags(one.value, where, allowed={"chown", "link"})
        if HEREDOC.search(text):
            raise Fault(f"{where}: text in the Dockerfile itself is not supported; put it into a file")
        if text.startswith("["):
            words = [self._whole(word, where) for word in json_words(text, where, "a source and a target")]
        else:
            words = self._words(text, where)
        names = [_text(word, where, one.value) for word in words]
        if len(names) < 2:
            raise Fault(f"{where} {text}: needs a source and a target")
        *sources, last = names
        target = self._place(last, where)
        if ".." in target.parts:
            raise Fault(f"{where} to {last}: leads upwards")
        into = last == "." or last.endswith(("/", "/.")) or len(sources) > 1 or self._is_folder(target)
        copies: list[Copy] = []
        files: dict[PurePosixPath, Path] = {}
        for source in sources:
            for path in _matches(source, self._context, where):
                if one.name == "ADD" and ARCHIVE.search(path.name):
                    raise Fault(f"{where} {source}: archives are not unpacked; unpack it, and use COPY")
                if path.is_dir():
                    files |= {target / name: file for name, file in files_below(path)}
                else:
                    files[target / path.name if into else target] = path.resolve()  # as Docker has it
                copies.append(Copy(source=path, target=f"{target}/" if into or path.is_dir() else str(target)))
        self.made.files |= files
        self._step(one, copies=tuple(copies), files=files)

    def _place(self, name: str, where: str) -> PurePosixPath:
        """Where `name` is, of a folder that may be relative."""
        path = PurePosixPath(self.made.workdir or "/", name)
        begins = self.made.workdir is not None or PLAIN.fullmatch(self.made.base) or not self._builds
        if not begins and not name.startswith("/"):
            raise Fault(f"{where} {name}: where work begins, the base alone knows: WORKDIR must say it before")
        return path

    def _is_folder(self, target: PurePosixPath) -> bool:
        """Whether it is one by now: Docker then copies into it."""
        known = [self.made.workdir or PurePosixPath("/"), *self.made.files]
        return any(target in path.parents for path in known) or target == self.made.workdir

    def _words(self, text: str, where: str) -> list[Word]:
        try:
            return split_words(text, self._variables)
        except ValueError as error:
            raise Fault(f"{where} {text[:MAX_SHOWN]}: {error}") from error

    def _whole(self, text: str, where: str, unset: str | None = None) -> Word:
        try:
            return whole_word(text, self._variables, unset)
        except ValueError as error:
            raise Fault(f"{where} {text[:MAX_SHOWN]}: {error}") from error

    def _literal(self, text: str, where: str) -> str:
        return _text(self._whole(text, where), where, text)


def _text(word: Word, where: str, line: str) -> str:
    found = literal(word)
    if found is None:
        raise Fault(f"{where} {line[:MAX_SHOWN]}: variables are not put in that neither ARG nor ENV sets")
    return found


def _pair(word: Word, where: str, line: str) -> tuple[str, Word]:
    first = word[0] if word else ""
    name, equals, value = first.partition("=") if isinstance(first, str) else ("", "", "")
    if not equals or not re.fullmatch(r"(?!-)\S+", name):
        raise Fault(f"{where} {line}: not of the form NAME=VALUE")
    return name, (*((value,) if value else ()), *word[1:])


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
