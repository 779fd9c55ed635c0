"""What a protocol makes of each field of a request: the table that it declares, and how values are held against it.

A field is named by its path, `messages[].content[].text`: `[]` stands for each item of a list. What lies below a listed
field without listed fields of its own is part of that field, whatever it is: a JSON schema, a tool call's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MAX_UNLISTED = 32
"""Of one request. More are none the wiser, and a record must not grow with what nobody understands."""
MAX_NAME = 80
"""Characters of an unlisted field's name; the rest is cut off."""

AT_PROVIDER = "it would run or be kept at the provider"
READS_TEXT = "this model reads text only"
WRITES_TEXT = "this model writes text only"
# Reasons for which every protocol refuses fields.


class FieldUse(StrEnum):
    """What becomes of a field."""

    RENDERED = "rendered"
    """It is part of the prompt."""
    HONOURED = "honoured"
    """It decides how the reply is drawn or written."""
    OVERRIDDEN = "overridden"
    """The campaign decides it. A request that asks for something is recorded and counted."""
    REFUSED = "refused"
    """A request that asks for it gets an error that names it."""
    IGNORED = "ignored"
    """It changes nothing, on purpose."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One row of a protocol's table."""

    path: str
    use: FieldUse
    why: str
    """What it is for, or why it is not obeyed."""
    asks_nothing: tuple[Any, ...]
    """Values that ask for nothing: they are neither counted nor refused."""


def rendered(why: str, *paths: str) -> tuple[Field, ...]:
    """Fields that are part of the prompt."""
    return _rows(FieldUse.RENDERED, why, paths)


def honoured(why: str, *paths: str) -> tuple[Field, ...]:
    """Fields that decide how the reply is drawn or written."""
    return _rows(FieldUse.HONOURED, why, paths)


def ignored(why: str, *paths: str) -> tuple[Field, ...]:
    """Fields that change nothing, on purpose."""
    return _rows(FieldUse.IGNORED, why, paths)


def overridden(why: str, *paths: str, asks_nothing: tuple[Any, ...] = ()) -> tuple[Field, ...]:
    """Fields that the campaign decides; null, and what `asks_nothing` lists, asks for nothing."""
    return _rows(FieldUse.OVERRIDDEN, why, paths, (None, *asks_nothing))


def refused(why: str, *paths: str, asks_nothing: tuple[Any, ...] = ()) -> tuple[Field, ...]:
    """Fields that get an error; null, false, and what is empty, asks for nothing."""
    return _rows(FieldUse.REFUSED, why, paths, (None, False, "", [], {}, *asks_nothing))


def _rows(use: FieldUse, why: str, paths: Iterable[str], asks_nothing: tuple[Any, ...] = ()) -> tuple[Field, ...]:
    return tuple(Field(path=path, use=use, why=why, asks_nothing=asks_nothing) for path in paths)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a walk met of note, each path once."""

    unlisted: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    """Those whose values ask for something."""
    refused: tuple[Field, ...] = ()
    """Those whose values ask for something."""

    def __bool__(self) -> bool:
        return bool(self.unlisted or self.overridden or self.refused)


NOTHING_FOUND = Findings()


def merge_findings(findings: Iterable[Findings]) -> Findings:
    """All of them, each path once, in order; of the unlisted ones, the first."""
    found = [one for one in findings if one]
    if not found:
        return NOTHING_FOUND
    return Findings(
        unlisted=tuple(dict.fromkeys(path for one in found for path in one.unlisted))[:MAX_UNLISTED],
        overridden=tuple(dict.fromkeys(path for one in found for path in one.overridden)),
        refused=tuple({row.path: row for one in found for row in one.refused}.values()),
    )


@dataclass(kw_only=True, eq=False)
class _Node:
    """A listed path, or the way to one."""

    path: str
    row: Field | None = None
    named: dict[str, _Node] = field(default_factory=dict)
    each: _Node | None = None
    """The items of a list."""

    def child(self, step: str) -> _Node:
        if step == "[]":
            self.each = self.each or _Node(path=f"{self.path}[]")
            return self.each
        return self.named.setdefault(step, _Node(path=f"{self.path}.{step}" if self.path else step))


class FieldTable:
    """Every request field that a protocol knows, and its use. Built from groups of rows, such as `ignored` returns."""

    def __init__(self, *groups: tuple[Field, ...]) -> None:
        self.fields: tuple[Field, ...] = tuple(row for group in groups for row in group)
        self._root = _Node(path="")
        for row in self.fields:
            node = self._find(row.path, make=True)
            if node.row is not None:
                raise ValueError(f"{row.path} is listed twice")
            node.row = row

    def inspect(self, value: Any, at: str = "") -> Findings:
        """Hold `value`, decoded JSON that stands at the path `at`, against the table. Linear in its size."""
        found: dict[_Node | str, None] = {}
        _walk(self._find(at), value, found)
        if not found:
            return NOTHING_FOUND
        rows = [node.row for node in found if isinstance(node, _Node) and node.row is not None]
        return Findings(
            unlisted=tuple(path for path in found if isinstance(path, str)),
            overridden=tuple(row.path for row in rows if row.use is FieldUse.OVERRIDDEN),
            refused=tuple(row for row in rows if row.use is FieldUse.REFUSED),
        )

    def lists(self, path: str) -> bool:
        """Is there a row for `path`, for something below it, or for something that it is part of?"""
        node = self._root
        for step in _steps(path):
            if node.row is not None and not node.named and node.each is None:
                return True
            known = node.each if step == "[]" else node.named.get(step)
            if known is None:
                return False
            node = known
        return True

    def _find(self, path: str, *, make: bool = False) -> _Node:
        node = self._root
        for step in _steps(path):
            known = node.each if step == "[]" else node.named.get(step)
            if known is None and not make:
                raise KeyError(path)
            node = known or node.child(step)
        return node


def _steps(path: str) -> Iterator[str]:
    return (match[0] for match in re.finditer(r"\[\]|[^.\[\]]+", path))


def _walk(node: _Node, value: Any, found: dict[_Node | str, None]) -> None:
    if isinstance(value, list):
        if node.each is not None:
            for item in value:
                _walk(node.each, item, found)
    elif isinstance(value, dict) and node.named:
        for name, item in value.items():
            child = node.named.get(name)
            if child is not None:
                _judge(child, item, found)
                _walk(child, item, found)
            elif len(found) < MAX_UNLISTED:
                found[f"{node.path}.{name[:MAX_NAME]}" if node.path else name[:MAX_NAME]] = None


def _judge(node: _Node, value: Any, found: dict[_Node | str, None]) -> None:
    row = node.row
    if row is not None and row.asks_nothing and value not in row.asks_nothing:
        found[node] = None
