"""The families of small tasks: what is asked, the workspace before and after, and the commands that do it.

A family is a function from slots (file names and words) to a `SmallTask`. Vocabularies are small on purpose: a policy
of a million parameters that starts from nothing learns the form of a tool call at once, and learns to copy names and
words out of its prompt only while there are few of them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

FILE_STEMS = (
    "alpha",
    "beacon",
    "cedar",
    "delta",
    "ember",
    "falcon",
    "garnet",
    "harbor",
    "island",
    "juniper",
    "kernel",
    "lagoon",
)
FILE_NAMES = tuple(f"{stem}.{ending}" for stem in FILE_STEMS for ending in ("txt", "md"))
WORDS = (
    *("apple", "bread", "cloud", "drum", "eagle", "flame", "grape", "honey"),
    *("iron", "jelly", "kite", "lemon", "mango", "night", "ocean", "piano"),
    *("queen", "river", "stone", "tiger", "uncle", "velvet", "window", "yellow"),
)
WORDS_PER_LINE = 2
"""Always as many: where the number varied, a tiny policy took twice as long to learn to copy."""
MAX_LINES = 5
"""Of an input file: its line count is one token."""
HELDOUT_SHARE = 4
"""One instruction in so many is held out, by its hash: whatever the seed or the settings."""


@dataclass(frozen=True, kw_only=True)
class ShellStep:
    """One shell command of a solution."""

    command: str
    output: str = ""
    """What it prints, without the last newline."""


@dataclass(frozen=True, kw_only=True)
class SmallTask:
    """A task with its solution."""

    family: str
    slots: dict[str, str]
    """All that distinguishes it from the others of its family."""
    instruction: str
    inputs: dict[str, str]
    """File name -> content, before."""
    expected: dict[str, str]
    """File name -> content, after: the whole workspace."""
    steps: tuple[ShellStep, ...]

    @property
    def split(self) -> Split:
        """The side of the split on which every task with this instruction lies."""
        return "train" if hashlib.sha256(self.instruction.encode()).digest()[0] % HELDOUT_SHARE else "heldout"


def small_task(family: str, slots: dict[str, str]) -> SmallTask:
    """The task of these slots. Raises `ValueError` for a family that there is not, `KeyError` for a missing slot."""
    if family not in FAMILIES:
        raise ValueError(f"task family {family!r} is none of {', '.join(FAMILIES)}")
    return FAMILIES[family].build(slots)


def draw_task(family: str, rng: random.Random, split: Split) -> SmallTask:
    """A random task of one family, on one side of the split."""
    while True:
        task = small_task(family, FAMILIES[family].draw(rng))
        if task.split == split:
            return task


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=WORDS_PER_LINE))


def _lines(rng: random.Random) -> str:
    return "".join(f"{_words(rng)}\n" for _ in range(rng.randint(1, MAX_LINES)))


def _two_files(rng: random.Random) -> tuple[str, str]:
    first, second = rng.sample(FILE_NAMES, 2)
    return first, second


# ---------------------------------------------------------------------------------------------------------------------
# create: a new file with one line
# ---------------------------------------------------------------------------------------------------------------------


def _draw_create(rng: random.Random) -> dict[str, str]:
    return {"file": rng.choice(FILE_NAMES), "line": _words(rng)}


def _create(slots: dict[str, str]) -> SmallTask:
    file, line = slots["file"], slots["line"]
    return SmallTask(
        family="create",
        slots=slots,
        instruction=f"Create the file {file} with the line: {line}",
        inputs={},
        expected={file: f"{line}\n"},
        steps=(ShellStep(command=f"echo {line} > {file}"),),
    )


# ---------------------------------------------------------------------------------------------------------------------
# append: one more line in a file
# ---------------------------------------------------------------------------------------------------------------------


def _draw_append(rng: random.Random) -> dict[str, str]:
    return {"file": rng.choice(FILE_NAMES), "line": _words(rng), "before": _lines(rng)}


def _append(slots: dict[str, str]) -> SmallTask:
    file, line, before = slots["file"], slots["line"], slots["before"]
    return SmallTask(
        family="append",
        slots=slots,
        instruction=f"Append to the file {file} the line: {line}",
        inputs={file: before},
        expected={file: f"{before}{line}\n"},
        steps=(ShellStep(command=f"echo {line} >> {file}"),),
    )


# ---------------------------------------------------------------------------------------------------------------------
# count: the number of lines of one file, into another
# ---------------------------------------------------------------------------------------------------------------------


def _draw_count(rng: random.Random) -> dict[str, str]:
    source, target = _two_files(rng)
    return {"source": source, "target": target, "lines": _lines(rng)}


def _count(slots: dict[str, str]) -> SmallTask:
    source, target, lines = slots["source"], slots["target"], slots["lines"]
    return SmallTask(
        family="count",
        slots=slots,
        instruction=f"Count the lines of {source} and write the number to {target}",
        inputs={source: lines},
        expected={source: lines, target: f"{len(lines.splitlines())}\n"},
        steps=(ShellStep(command=f"wc -l < {source} > {target}"),),
    )


# ---------------------------------------------------------------------------------------------------------------------
# relay: a file names the file to create, so that it must be read first
# ---------------------------------------------------------------------------------------------------------------------


def _draw_relay(rng: random.Random) -> dict[str, str]:
    note, file = _two_files(rng)
    return {"note": note, "file": file, "line": _words(rng)}


def _relay(slots: dict[str, str]) -> SmallTask:
    note, file, line = slots["note"], slots["file"], slots["line"]
    return SmallTask(
        family="relay",
        slots=slots,
        instruction=f"Read {note}, then create the file that it names with the line: {line}",
        inputs={note: f"{file}\n"},
        expected={note: f"{file}\n", file: f"{line}\n"},
        steps=(ShellStep(command=f"cat {note}", output=file), ShellStep(command=f"echo {line} > {file}")),
    )


@dataclass(frozen=True)
class Family:
    """How tasks of one kind are drawn and built."""

    draw: Callable[[random.Random], dict[str, str]]
    build: Callable[[dict[str, str]], SmallTask]


FAMILIES = {
    "create": Family(_draw_create, _create),
    "append": Family(_draw_append, _append),
    "count": Family(_draw_count, _count),
    "relay": Family(_draw_relay, _relay),
}
