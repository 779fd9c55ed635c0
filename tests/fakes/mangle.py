"""Requests as harnesses send them, and what becomes of them in bad hands: reproducible by seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain
from typing import Any

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}, "required": ["path"]}
ARGUMENTS = {"path": "a.txt", "n": 1.0, "deep": {"list": [1, None, "é"]}}

REQUESTS: dict[str, dict[str, Any]] = {
    "anthropic": {
        "model": "policy",
        "max_tokens": 500,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Read it."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": ARGUMENTS},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "ok"}]},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [{"name": "Read", "description": "Read a file.", "input_schema": SCHEMA}],
        "stop_sequences": ["END"],
        "temperature": 1.0,
        "stream": True,
    },
    "openai_chat": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Read it."}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "Read", "arguments": json.dumps(ARGUMENTS)}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
        "tools": [{"type": "function", "function": {"name": "Read", "description": "", "parameters": SCHEMA}}],
        "max_completion_tokens": 500,
        "stop": ["END"],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "openai_responses": {
        "model": "policy",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": None},
            {"type": "function_call", "name": "Read", "arguments": json.dumps(ARGUMENTS), "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
            {"type": "custom_tool_call", "name": "patch", "input": "*** Begin", "call_id": "c2"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
        ],
        "tools": [
            {"type": "function", "name": "Read", "description": "", "parameters": SCHEMA, "strict": False},
            {"type": "custom", "name": "patch", "description": "", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "namespace", "name": "lab", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
        ],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium"},
        "stream": True,
        "store": False,
    },
    "gemini": {
        "systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Read it."}]},
            {
                "role": "model",
                "parts": [
                    {"text": "Hm.", "thought": True},
                    {"text": "Let me look."},
                    {"functionCall": {"id": "c1", "name": "Read", "args": ARGUMENTS}, "thoughtSignature": "eA=="},
                ],
            },
            {"role": "user", "parts": [{"function_response": {"name": "Read", "response": {"output": "ok"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "Read", "parametersJsonSchema": SCHEMA}]}],
        "generation_config": {"temperature": 1, "topP": 0.95, "topK": 64, "maxOutputTokens": 500},
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "safetySettings": [],
    },
}
"""Protocol -> a request with every kind of thing that harnesses put into one."""

DEEP = {
    f"nested {depth} deep, {kind}": start * depth + "1" + end * depth
    for depth in (150, 500, 900)
    for kind, start, end in (("lists", "[", "]"), ("objects", '{"a":', "}"))
}
"""What stands for a deeply nested value in a request, or for its JSON text, as arguments are sent -> that text."""
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**53 + 1, 2**63, 10**30, 1e308, -0.0),
    *("", " ", "\0", "\n" * 5, "é🦀", "\ud800", "a\udfff", "<|im_end|>", "<tool_call>", "x" * 5000, "auto", "1"),
    *([], {}, [[]], [None], {"": None}, {"type": None}, {"type": "text"}, [{"type": "image"}], {"role": "user"}),
    *DEEP,
    *(f"text of {name}" for name in DEEP),
    *("user", "assistant", "tool", "system", "model", "function", "text", "tool_use", "grammar", "namespace"),
)
ODD_NAMES = ("x", "", "a.b", "[]", "type", "role", "content", "parts", "function_call", "$ref", "é" * 200)
ODD_BYTES = (
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 6000, b"-" + b"9" * 400, b"0" * 50, b"1.0e-400", b"nul", b"'", b"\\"),
    *(b'"\\ud83d"', b'"\\u00zz"', b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\x1f", b"\xef\xbb\xbf", b",", b"}"),
    *(b"[", b'{"', b'"', b":", b" " * 100, b"/*x*/", b'{"a":1,"a":2}', b"[" * 500, b'{"a":' * 500, b"[" * 200_000),
)


def mangled_bodies(seed: int, number: int) -> Iterator[tuple[str, bytes]]:
    """(protocol whose request it was, body), all different. The first of each protocol is whole."""
    chance = random.Random(seed)
    seen: set[bytes] = set()
    for protocol in chain(REQUESTS, iter(lambda: chance.choice(list(REQUESTS)), None)):
        body = encode(REQUESTS[protocol]) if len(seen) < len(REQUESTS) else _mangle(chance, REQUESTS[protocol])
        if body not in seen:
            seen.add(body)
            yield protocol, body
        if len(seen) == number:
            return


def _mangle(chance: random.Random, whole: dict[str, Any]) -> bytes:
    request = deepcopy(whole)
    num_edits, num_cuts = chance.choice(((1, 0), (2, 0), (2, 0), (3, 0), (9, 0), (1, 1), (0, 1), (0, 2)))
    for _ in range(num_edits):
        chance.choice(EDITS)(chance, request)
    body = encode(request)
    for _ in range(num_cuts):
        body = chance.choice(CUTS)(chance, body)
    return body


def encode(request: Any) -> bytes:
    """As JSON; half a surrogate pair is an escape, as JavaScript writes it."""
    text = json.dumps(request)
    for name, value in DEEP.items() if "nested" in text else ():
        text = text.replace(json.dumps(name), value)
        text = text.replace(json.dumps(f"text of {name}"), json.dumps(value))
    return text.encode()


# ---------------------------------------------------------------------------------------------------------------------
# What happens to a request
# ---------------------------------------------------------------------------------------------------------------------


def _replace(chance: random.Random, request: Any) -> None:
    parent, key = _somewhere(chance, request)
    parent[key] = deepcopy(chance.choice(ODD_VALUES))


def _say(chance: random.Random, request: Any) -> None:
    """Another text, name or id."""
    said = [(parent, key) for parent, key in _places(request) if isinstance(parent[key], str)]
    if said:
        parent, key = chance.choice(said)
        parent[key] = chance.choice([value for value in ODD_VALUES if isinstance(value, str)])


def _add(chance: random.Random, request: Any) -> None:
    """A field that nobody knows, or an item."""
    parent, _ = _somewhere(chance, request)
    if isinstance(parent, dict):
        parent[chance.choice(ODD_NAMES)] = deepcopy(chance.choice(ODD_VALUES))
    else:
        parent.insert(chance.randrange(len(parent) + 1), chance.choice(parent))


def _remove(chance: random.Random, request: Any) -> None:
    parent, key = _somewhere(chance, request)
    del parent[key]


def _rename(chance: random.Random, request: Any) -> None:
    parent, key = _somewhere(chance, request)
    if isinstance(parent, dict):
        parent[chance.choice((key.upper(), f"{key}_", *ODD_NAMES))] = parent.pop(key)


def _wrap(chance: random.Random, request: Any) -> None:
    parent, key = _somewhere(chance, request)
    for _ in range(chance.choice((1, 2, 300))):
        parent[key] = [parent[key]] if chance.random() < 0.5 else {"a": parent[key]}


def _repeat(chance: random.Random, request: Any) -> None:
    parent, _ = _somewhere(chance, request)
    if isinstance(parent, list):
        parent.extend(parent * chance.choice((1, 3, 50)))
        del parent[500:]


def _transplant(chance: random.Random, request: Any) -> None:
    """A piece of some protocol's request in the place of another."""
    donor, donor_key = _somewhere(chance, deepcopy(REQUESTS[chance.choice(list(REQUESTS))]))
    parent, key = _somewhere(chance, request)
    parent[key] = donor[donor_key]


EDITS: tuple[Callable[[random.Random, Any], None], ...] = (
    *(_say, _say, _say, _add, _add, _replace, _replace),
    *(_remove, _rename, _wrap, _repeat, _transplant),
)


def _somewhere(chance: random.Random, request: Any) -> tuple[Any, Any]:
    """A container inside `request` that holds something, and one of its keys."""
    places = list(_places(request))
    return chance.choice(places) if places else ([None], 0)


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        if depth < 20:
            yield from _places(value[key], depth + 1)


# ---------------------------------------------------------------------------------------------------------------------
# What happens to its bytes
# ---------------------------------------------------------------------------------------------------------------------


def _insert(chance: random.Random, body: bytes) -> bytes:
    at = chance.randrange(len(body) + 1)
    return body[:at] + chance.choice(ODD_BYTES) + body[at:]


def _overwrite(chance: random.Random, body: bytes) -> bytes:
    at = chance.randrange(len(body) + 1)
    return body[:at] + bytes([chance.randrange(256)]) + body[at + 1 :]


def _truncate(chance: random.Random, body: bytes) -> bytes:
    return body[: chance.randrange(len(body) + 1)]


def _twice(chance: random.Random, body: bytes) -> bytes:
    return body + body


def _other_value(chance: random.Random, body: bytes) -> bytes:
    return chance.choice((b"", b" ", b"null", b"[]", b"{}", b'"a"', b"3", *ODD_BYTES))


def _other_encoding(chance: random.Random, body: bytes) -> bytes:
    return body.decode(errors="replace").encode(chance.choice(("utf-16", "utf-32-le", "utf-8-sig")))


def _double_a_key(chance: random.Random, body: bytes) -> bytes:
    return b'{"messages":[],"contents":null,"input":3,' + body[1:]


CUTS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _insert,
    _insert,
    _overwrite,
    _truncate,
    _twice,
    _other_value,
    _other_encoding,
    _double_a_key,
)
