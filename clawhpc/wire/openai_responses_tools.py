"""OpenAI Responses: tools that the policy is offered in another form than the harness knows them.

- A freeform tool is offered as a function with one string, `input`. A call whose arguments are nothing but that is
  answered with the bare text of it; any other with its arguments as they are, and an id that says so (`BARE_SUFFIX`),
  by which they are read back as what they were.
- A tool in a namespace is offered under one flat name, `mcp__lab__add`.
- Tools that would run at the provider are left out where harnesses offer them whatever the model, else refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from clawhpc.records import Tool, ToolCall
from clawhpc.wire.base import invalid, parse_arguments
from clawhpc.wire.fields import AT_PROVIDER

BARE_SUFFIX = "_arguments"
"""Of a freeform call's id: its text is the arguments as they were drawn, not the `input` in them."""
FREEFORM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
NOT_OFFERED = frozenset({"web_search", "web_search_preview", "image_generation"})
"""Types of tools that a harness offers whatever the model; the provider would run them."""


@dataclass(frozen=True, kw_only=True)
class OfferedTool:
    """How the harness knows a tool that the policy knows under a name of ours, or as a function that it is not."""

    name: str
    namespace: str | None = None
    freeform: bool = False


class ResponsesTool(Struct):
    """A tool as the harness offers it."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponsesTool] | None = None


def read_tools(given: list[ResponsesTool] | None) -> tuple[tuple[Tool, ...], dict[str, OfferedTool]]:
    """What the policy is offered; and, by the policy's name, those tools that the harness knows otherwise."""
    tools: list[Tool] = []
    offered: dict[str, OfferedTool] = {}
    for namespace, tool in _flatten(given or ()):
        name = flat_name(namespace, tool.name)
        tools.append(Tool(name=name, description=tool.description or "", parameters=_parameters(tool)))
        if namespace or tool.type == "custom":
            offered[name] = OfferedTool(name=tool.name, namespace=namespace, freeform=tool.type == "custom")
    return tuple(tools), offered


def _flatten(
    tools: Iterable[ResponsesTool], namespace: str | None = None
) -> Iterator[tuple[str | None, ResponsesTool]]:
    for tool in tools:
        if tool.type == "namespace" and namespace is None:
            yield from _flatten(tool.tools or (), tool.name)
        elif tool.type in ("function", "custom"):
            yield namespace, tool
        elif tool.type not in NOT_OFFERED:
            raise invalid(f"a tool of type {tool.type!r} is not supported: {AT_PROVIDER}")


def _parameters(tool: ResponsesTool) -> dict[str, Any]:
    if tool.type == "function":
        return tool.parameters or {}
    grammar = (tool.format or {}).get("definition")
    if not isinstance(grammar, str):
        return FREEFORM
    text = {"type": "string", "description": f"Text of this grammar:\n{grammar}"}
    return {**FREEFORM, "properties": {"input": text}}


def flat_name(namespace: str | None, name: str) -> str:
    """The name under which the policy knows a tool of a namespace."""
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}" if namespace else name


def freeform_arguments(call_id: str, text: str) -> str:
    """The arguments that the policy drew, of a freeform call that the harness sends back."""
    return text if call_id.endswith(BARE_SUFFIX) else msgspec.json.encode({"input": text}).decode()


def freeform_call(call: ToolCall) -> tuple[str, str]:
    """Id and text of a freeform call, as it is sent: the inverse."""
    text = _freeform_input(call.arguments)
    return (call.id + BARE_SUFFIX, call.arguments) if text is None else (call.id, text)


def _freeform_input(arguments: str) -> str | None:
    """The text of a freeform call; None where the arguments are not just that."""
    try:
        value = parse_arguments(arguments)
    except ValueError:
        return None
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else None
