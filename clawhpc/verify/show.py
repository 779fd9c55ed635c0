"""A workspace as a judge sees it: one JSON value per file, each within bounds that say what was left out.

What the policy wrote is hostile until proven otherwise. Nothing is followed and nothing is run: links, binary files and
folders of installed packages are named only; of a file at most its head and tail are read, so that none is too large.
Entries come in an order that depends on names alone, but what the task has brought, unchanged, comes last.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any, Literal

from clawhpc.records import TaskSpec
from clawhpc.verify.settings import JudgeSettings
from clawhpc.verify.workspace import LONGEST_PATH, OPEN_FILE, OPEN_FOLDER, allow

State = Literal["new", "changed", "as given"]
"""Beside the files that the task began with."""
UNREAD_FOLDERS = frozenset({".git", ".venv", "node_modules", "__pycache__"})
"""Nobody's answer: what tools keep in them would crowd out the rest."""
MAX_ENTRIES = 2000
"""Looked at; the rest of a larger workspace is counted as left out."""
MAX_NAMED_BYTES = 20_000
"""Of JSON for entries that are named only."""
HEAD_SHARE = 0.75
"""Of what is shown of a long file; the rest is its tail."""
BRACKETED = re.compile(r"\[(?=/?[a-z]?[A-Z])")
"""What begins a control token in some chat formats: `[INST]`, `[/INST]`, `[gMASK]`."""
HIDDEN = (
    *((0x7F, 0x9F), (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
    *((0x180B, 0x180F), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xD800, 0xDFFF)),
    *((0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0x1BCA0, 0x1BCA3)),
    *((0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
)
"""First and last of characters that nobody sees, end a line or turn the direction of a text: Unicode's controls, what
it calls Default_Ignorable_Code_Point, and halves of characters.
"""
SPELLED = {
    code: re.sub("....", r"\\u\g<0>", chr(code).encode("utf-16-be", "surrogatepass").hex())
    for code in (*map(ord, "<＜"), *(code for first, last in HIDDEN for code in range(first, last + 1)))
}
"""Code point -> its escape in JSON. The first two begin most control tokens: `<|im_end|>`, `</s>`."""


HEAD = ("path", "state", "bytes")
"""What each entry of a file begins with."""
NOT_SHOWN, LEFT_OUT = "not_shown", "left_out"
"""Why an entry is named only; what there is beyond those that are named."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A regular file of the workspace."""

    path: Path
    name: str
    """Below the workspace, as text."""
    num_bytes: int
    state: State


def show_workspace(task: TaskSpec, workspace: Path, settings: JudgeSettings) -> list[str]:
    """One line of JSON per entry, shown or named, and a last one on what was left out, if anything was.

    No process of the harness may run any more.
    """
    entries = list(_walk(workspace, task))
    files = [entry for entry in entries if isinstance(entry, Found)]
    named = [entry for entry in entries if not isinstance(entry, Found)]
    ordered = sorted(files, key=lambda found: (found.state == "as given", found.name))
    shown = (_shown(found, settings.max_file_bytes) for found in ordered)
    return _fitted(shown, named, settings.max_workspace_bytes, MAX_NAMED_BYTES)


def show_less(lines: Sequence[str], settings: JudgeSettings, share: float) -> list[str]:
    """What `show_workspace` has shown, in `share` of the room: of each file, of all together, and for names."""
    entries = [json.loads(line) for line in lines]
    shown = (_cut(entry, int(share * settings.max_file_bytes)) for entry in entries if "text" in entry)
    named = [entry for entry in entries if "text" not in entry]
    return _fitted(shown, named, int(share * settings.max_workspace_bytes), int(share * MAX_NAMED_BYTES))


def _fitted(
    shown: Iterable[dict[str, Any]], named: list[dict[str, Any]], room_bytes: int, named_bytes: int
) -> list[str]:
    """Lines for what there is room for, the first of `shown` first; the others are named."""
    lines: list[str] = []
    for entry in shown:
        line = escaped(entry)
        num_bytes = len(line.encode())
        if NOT_SHOWN in entry:
            named.append(entry)
        elif num_bytes > room_bytes:
            named.append({key: entry[key] for key in HEAD} | {NOT_SHOWN: "there is no room left"})
        else:
            room_bytes -= num_bytes
            lines.append(line)
    return [*lines, *_named(sorted(named, key=lambda entry: NOT_SHOWN in entry), named_bytes)]


def escaped(value: Any) -> str:
    """`value` as one line of JSON in which no character stands that a chat format, or a reader of lines, could take for
    more than text: they are spelled as escapes, so that the value read back is the same.
    """
    return BRACKETED.sub(r"\\u005b", json.dumps(value, ensure_ascii=False)).translate(SPELLED)


def show_text(text: str, max_bytes: int) -> str:
    """`text`, or its end, which says how much stood before it. In UTF-8, where a character may be four bytes."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    end = encoded[-max_bytes:].decode(errors="ignore")
    return f"({len(text) - len(end)} characters are not shown) {end}"


def _named(named: list[dict[str, Any]], room: int) -> Iterator[str]:
    """What is said of entries that are not shown, as far as there is room, and how many there are beyond."""
    for number, entry in enumerate(named):
        line = escaped(entry)
        room -= len(line.encode())
        if room < 0:
            yield escaped({LEFT_OUT: f"{len(named) - number} more entries are not even named"})
            return
        yield line


def _walk(workspace: Path, task: TaskSpec) -> Iterator[Found | dict[str, Any]]:
    """The files, and what is named only, folder by folder in the order of their names."""
    folders, num_seen = [workspace], 0
    while folders:
        folder = folders.pop()
        allow(str(folder), OPEN_FOLDER)
        below: list[Path] = []
        with os.scandir(folder) as entries:  # of a million no more are kept than are looked at
            names = nsmallest(MAX_ENTRIES + 1 - num_seen, (entry.name for entry in entries))
        for path in map(folder.joinpath, names):
            num_seen += 1
            if num_seen > MAX_ENTRIES:
                yield {LEFT_OUT: f"the workspace has more than {MAX_ENTRIES} entries; the rest was not looked at"}
                return
            name = _text(os.fsencode(path.relative_to(workspace)))
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                if path.name in UNREAD_FOLDERS or len(os.fsencode(path)) > LONGEST_PATH:
                    yield {"path": name + "/", NOT_SHOWN: "a folder that is not looked into"}
                else:
                    below.append(path)
            elif stat.S_ISREG(status.st_mode):
                yield Found(path=path, name=name, num_bytes=status.st_size, state=_state(path, workspace, task))
            else:
                yield {"path": name, NOT_SHOWN: _kind(path, status.st_mode)}
        folders.extend(reversed(below))


def _kind(path: Path, mode: int) -> str:
    """What an entry is that is neither file nor folder."""
    if stat.S_ISLNK(mode):
        return f"a link to {_text(os.fsencode(os.readlink(path)))}"
    return "a pipe, socket or device"


def _state(path: Path, workspace: Path, task: TaskSpec) -> State:
    inputs = workspace / task.input_subdir
    if task.input_dir is None or not path.is_relative_to(inputs):
        return "new"
    given = Path(task.input_dir) / path.relative_to(inputs)
    if not given.is_file():
        return "new"
    allow(str(path), OPEN_FILE)
    return "as given" if filecmp.cmp(given, path, shallow=False) else "changed"


def _shown(found: Found, max_bytes: int) -> dict[str, Any]:
    """The file's text, or its head and tail and how much is missing between them; binary files are named only."""
    allow(str(found.path), OPEN_FILE)
    head_bytes, tail_bytes = _ends(found.num_bytes, max_bytes)
    with found.path.open("rb") as file:
        head = file.read(head_bytes)
        file.seek(max(head_bytes, found.num_bytes - tail_bytes))
        tail = file.read(tail_bytes)
    about = dict(zip(HEAD, (found.name, found.state, found.num_bytes), strict=True))
    if b"\0" in head + tail or not _is_text(head, cut_end=bool(tail)) or not _is_text(tail, cut_start=True):
        return {**about, NOT_SHOWN: "not UTF-8 text"}
    return _with_text(about, head, tail)


def _cut(entry: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """An entry with text, as `_shown` would have it with fewer bytes."""
    head, tail = entry["text"].encode(errors="replace"), entry.get("tail", "").encode(errors="replace")
    head_bytes, tail_bytes = _ends(len(head) + len(tail), max_bytes)
    if not tail_bytes:
        return entry
    return _with_text({key: entry[key] for key in HEAD}, head[:head_bytes], (tail or head)[-tail_bytes:])


def _ends(num_bytes: int, max_bytes: int) -> tuple[int, int]:
    """How many of `num_bytes` are shown from the start and from the end."""
    head_bytes = int(HEAD_SHARE * max_bytes)
    return (max_bytes, 0) if num_bytes <= max_bytes else (head_bytes, max_bytes - head_bytes)


def _with_text(about: dict[str, Any], head: bytes, tail: bytes) -> dict[str, Any]:
    shown = {**about, "text": head.decode(errors="ignore")}
    if tail:
        cut = about["bytes"] - len(head) - len(tail)
        shown |= {"cut": f"{cut} bytes are not shown", "tail": tail.decode(errors="ignore")}
    return shown


def _is_text(content: bytes, *, cut_start: bool = False, cut_end: bool = False) -> bool:
    """Whether `content` is UTF-8, but for a character that was cut in two where it was cut."""
    start = next((at for at in range(4) if content[at : at + 1] < b"\x80" or content[at : at + 1] >= b"\xc0"), 0)
    try:
        content[start if cut_start else 0 :].decode()
    except UnicodeDecodeError as error:
        return cut_end and error.reason == "unexpected end of data"
    return True


def _text(path: bytes) -> str:
    """The bytes of a path; those that are no UTF-8 stay told apart."""
    return path.decode(errors="backslashreplace")
