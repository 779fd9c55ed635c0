"""The instructions of a Dockerfile: which lines belong together, and the form that their values have. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clawhpc.tasks.faults import Fault

HEREDOC = re.compile(r"(?:^|\s)\d*<<-?([\"']?)(\w+)\1(?=\s|$)")
CONTINUED = re.compile(r"\\\s*$")
DIRECTIVE = re.compile(r"\s*#\s*(\w+)\s*=\s*(\S*)\s*")
FLAG = re.compile(r"--([\w-]+)(=\S+)?\s+")
MAX_SHOWN = 200
"""Characters of a line in a fault."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line of a Dockerfile, continued lines included."""

    line: int
    name: str
    """In capitals."""
    value: str
    text: str = ""
    """The lines of its heredocs, each with its end."""


def instructions(text: str, path: Path) -> Iterator[Instruction]:
    """Those in the `text` of `path`, without comments."""
    _check_escape(text, path)
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line.lstrip()
        while CONTINUED.search(whole):
            whole = CONTINUED.sub("", whole)
            _, following = next(lines, (0, None))
            if following is not None:
                skipped = not following.strip() or following.lstrip().startswith("#")
                whole += "\\" if skipped else following
        if not whole.strip():
            continue
        heredocs: list[str] = []
        for _, end in HEREDOC.findall(whole):
            for _, line in lines:
                heredocs.append(f"{line}\n")
                if line.strip() == end:
                    break
            else:
                raise Fault(f"{path}:{number}: no line {end} ends its text")
        name, *value = whole.strip().split(None, 1)
        yield Instruction(line=number, name=name.upper(), value="".join(value), text="".join(heredocs))


def _check_escape(text: str, path: Path) -> None:
    """A fault where the first lines say that something else than a backslash continues a line, and it matters."""
    for number, line in enumerate(text.splitlines(), start=1):
        directive = DIRECTIVE.fullmatch(line)
        if directive is None:
            return
        is_other = directive[1].lower() == "escape" and directive[2] != "\\"
        if is_other and ("\\" in text or text.count(directive[2]) > 1):
            raise Fault(f"{path}:{number}: {line.strip()}: only a backslash continues a line here")


def split_flags(text: str, where: str, *, allowed: set[str]) -> tuple[list[tuple[str, str]], str]:
    """The flags that a line begins with, name and `=value`, and what follows them."""
    flags = []
    while flag := FLAG.match(text):
        if flag[1] not in allowed:
            raise Fault(f"{where} --{flag[1]}: not supported")
        flags.append((flag[1], flag[2] or ""))
        text = text[flag.end() :]
    return flags, text


def json_words(text: str, where: str, needed: str = "a list of texts") -> list[str]:
    """Those of a JSON list; a fault that says what is `needed` where it is none."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Fault(f"{where} {text[:MAX_SHOWN]}: {error}") from error
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise Fault(f"{where} {text[:MAX_SHOWN]}: needs {needed}")
    return words
