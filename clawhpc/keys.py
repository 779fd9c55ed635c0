"""The keys of a configuration: which are known, and which hold paths. Pure."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from clawhpc.errors import UserError

LARGEST_INT = 2**63 - 1
"""In magnitude; what the JSON files of a run can hold."""


def make_absolute(content: dict[Any, Any], key: str) -> None:
    """Make the path at a dotted `key`, or each of those in a mapping, absolute: workers and sandboxes run elsewhere.

    UserError when it is empty.
    """
    *parents, name = key.split(".")
    for parent in parents:
        content = content[parent]
    if isinstance(content[name], dict):
        content[name] = {one: absolute(value, f"{key}.{one}") for one, value in content[name].items()}
    else:
        content[name] = absolute(content[name], key)


def absolute(value: Any, key: str) -> Any:
    """A path, each of a list, or settings with a `folder`, absolute; anything else as it is."""
    match value:
        case "":
            raise UserError(f"{key} is empty: name a path, or leave it out")
        case str():
            return str(Path(os.path.expanduser(value)).absolute())  # ~nobody stays, and is found to be missing
        case [*paths]:
            return [absolute(path, key) for path in paths]
        case {"folder": folder}:
            return value | {"folder": absolute(folder, f"{key}.folder")}
    return value


def check_keys(content: dict[Any, Any], kind: type[Any], path: str, *, whole: bool = True) -> None:
    """UserError names the first key that is unknown, or that a `whole` one lacks, or whose value is not allowed."""
    known = {one.name: one for one in fields(kind)}
    types = msgspec.inspect.type_info(kind)
    assert isinstance(types, msgspec.inspect.DataclassType), f"{kind} is a settings class"
    kinds = {one.name: one.type for one in types.fields}
    if whole and (missing := sorted(known.keys() - content.keys())):
        raise UserError(f"{path}{missing[0]} is missing: a setting can be changed, not removed")
    for key, value in content.items():
        if key not in known:
            raise UserError(f"unknown key {path}{key}; allowed are {', '.join(sorted(known))}")
        inner = kinds[key]
        if isinstance(inner, msgspec.inspect.LiteralType) and value not in inner.values:
            raise UserError(f"{path}{key}={value}: must be one of {', '.join(map(str, inner.values))}")
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise UserError(f"{path}{key}={value}: needs more than 64 bits")
        if isinstance(inner, msgspec.inspect.DataclassType):
            if not isinstance(value, dict):
                raise UserError(
                    f"{path}{key}: holds settings, such as {path}{key}.{fields(inner.cls)[0].name}; set those"
                )
            check_keys(value, inner.cls, f"{path}{key}.", whole=whole)
        if isinstance(inner, msgspec.inspect.DictType) and isinstance(value, dict):
            check_named(value, inner.value_type, f"{path}{key}.")


def check_named(content: dict[Any, Any], kind: msgspec.inspect.Type, path: str) -> None:
    """`check_keys` of settings that stand under names of the user's, each with the keys that it needs."""
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    for name, value in content.items():
        for one in kinds:
            if isinstance(value, dict) and isinstance(one, msgspec.inspect.DataclassType):
                check_keys(value, one.cls, f"{path}{name}.", whole=False)
