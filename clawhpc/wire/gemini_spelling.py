"""Gemini generateContent: the other spelling, `system_instruction` for `systemInstruction`, which the API takes too."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from clawhpc.wire.base import MAX_DEPTH
from clawhpc.wire.body import decode_value, mend_surrogates
from clawhpc.wire.fields import FieldTable


def spelled_as_json(body: bytes, table: FieldTable) -> bytes:
    """`body` with the names of listed fields as JSON spells them; what is no field, arguments and schemas, stays.

    Raises `WireError` for what is nested too deeply.
    """
    fields = decode_value(mend_surrogates(body), max_depth=2 * MAX_DEPTH)  # what it wraps may have its own depth
    return msgspec.json.encode(_respell(fields, table, ""))


def _respell(value: Any, table: FieldTable, at: str) -> Any:
    if isinstance(value, list):
        return [_respell(item, table, f"{at}[]") for item in value]
    if not isinstance(value, dict):
        return value
    respelled = {}
    for name, item in value.items():
        path = _listed_path(name, table, at)
        field = path and path.removeprefix(f"{at}.")
        respelled[field or name] = item if path is None else _respell(item, table, path)
    return respelled


def _listed_path(name: str, table: FieldTable, at: str) -> str | None:
    """The path of the field `name` of what stands at `at`, as JSON spells it; None when none of that name is listed."""
    camel = re.sub(r"_([a-z])", lambda match: match[1].upper(), name)
    paths = (f"{at}.{each}" if at else each for each in (name, camel) if each.isidentifier())
    return next((path for path in paths if table.lists(path)), None)
