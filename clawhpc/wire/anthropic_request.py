"""Anthropic Messages: what is asked.

Choices where the API leaves them open:

- The line `x-anthropic-billing-header: …`, which Claude Code puts first into `system`, is no part of the prompt: it
  holds a nonce, and would give every conversation a root of its own.
- `system` messages inside `messages` stay where they stand.
- `cache_control`, citations, signatures and redacted reasoning are dropped: they mean nothing to this model.
- `is_error` of a tool result is dropped: harnesses say in the text that the tool failed.
- Text after a tool call joins the text before it, which is what Claude Code makes of it on the way back.
- A `tool_reference`, which Claude Code's tool search answers with, is the name of the tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from msgspec import Raw, Struct

from clawhpc.records import Conversation, Message, Sampling, Tool, ToolCall
from clawhpc.wire.base import TokenLimit, WireRequest, invalid, join_blocks, split_at_results
from clawhpc.wire.body import BodyReader, PieceReader, refuse
from clawhpc.wire.fields import (
    AT_PROVIDER,
    READS_TEXT,
    FieldTable,
    honoured,
    ignored,
    merge_findings,
    overridden,
    refused,
    rendered,
)

BILLING_PREFIX = "x-anthropic-billing-header:"

CONTENT = "messages[].content[]"
FIELDS = FieldTable(
    honoured("how the answer is sent and named", "stream", "model"),
    honoured("counts where it is lower than what the campaign allows", "max_tokens"),
    honoured("the reply ends before the first of them", "stop_sequences"),
    rendered("one system message first", "system", "system[].type", "system[].text"),
    rendered("system, user or assistant", "messages", "messages[].role"),
    rendered("text", "messages[].content", f"{CONTENT}.type", f"{CONTENT}.text"),
    rendered("reasoning that is sent back", f"{CONTENT}.thinking"),
    rendered("a tool call", f"{CONTENT}.id", f"{CONTENT}.name", f"{CONTENT}.input"),
    rendered("a tool's result", f"{CONTENT}.tool_use_id", f"{CONTENT}.content", f"{CONTENT}.content[].type"),
    rendered("its text, or the name of a tool", f"{CONTENT}.content[].text", f"{CONTENT}.content[].tool_name"),
    rendered("the tools that are offered", "tools", "tools[].name", "tools[].description", "tools[].input_schema"),
    overridden("the campaign samples", "temperature"),
    overridden("the campaign samples from the whole distribution", "top_p", asks_nothing=(1,)),
    overridden("the campaign samples from the whole distribution", "top_k", asks_nothing=(-1, 0)),
    overridden("a forced choice would mask log-probs", "tool_choice.type", asks_nothing=("auto",)),
    overridden("one reply may hold several calls", "tool_choice.disable_parallel_tool_use", asks_nothing=(False,)),
    overridden("a grammar would mask log-probs", "output_config.format", "output_format"),
    overridden("a grammar would mask log-probs", "tools[].strict", asks_nothing=(False,)),
    overridden(
        "the chat format decides whether the policy thinks",
        *("thinking", "output_config.effort", "messages[].output_config"),
    ),
    ignored("belongs to `tool_choice.type`", "tool_choice.name"),
    ignored(
        "how the provider caches: it means nothing here",
        *("cache_control", "system[].cache_control", "tools[].cache_control"),
        *(f"{CONTENT}.cache_control", f"{CONTENT}.content[].cache_control"),
    ),
    ignored("only the provider can read it", f"{CONTENT}.signature", f"{CONTENT}.data"),
    ignored("citations are not written", "system[].citations"),
    ignored("citations are not written", f"{CONTENT}.citations", f"{CONTENT}.content[].citations"),
    ignored("harnesses say in the text that a tool failed", f"{CONTENT}.is_error"),
    ignored("who made the call: always the model", f"{CONTENT}.caller", f"{CONTENT}.toolset_name"),
    ignored("every tool is offered, in full", "tools[].defer_loading", "tools[].allowed_callers"),
    ignored("a reply is sent whole", "tools[].eager_input_streaming"),
    ignored("the description and the schema say it", "tools[].input_examples"),
    ignored("the history is rendered as it is sent", "context_management", "compaction", "messages[].clear_at"),
    ignored("how much may be spent in all is the rollout's limit", "output_config.task_budget"),
    ignored(
        "how the provider serves, routes and bills",
        *("metadata", "service_tier", "speed", "inference_geo", "diagnostics", "billing_policy", "betas"),
        *("fallbacks", "fallback_credit_token", "user_profile_id", "workspace_id"),
    ),
    refused(AT_PROVIDER, "container", "mcp_servers", "thread"),
    refused(AT_PROVIDER, "tools[].type", asks_nothing=("custom",)),
    refused(READS_TEXT, f"{CONTENT}.source", f"{CONTENT}.content[].source"),
)


def read_request(body: bytes) -> WireRequest:
    """Read a body of `/v1/messages` or `/v1/messages/count_tokens`. Raises `WireError`."""
    read = _body.read(body)
    request = read.fields
    if not request.messages:
        raise invalid("messages: at least one message is required")
    system, in_system = _system.read(request.system, "$.system")
    messages, in_messages = _messages.read_each(request.messages, "$.messages")
    tools, in_tools = _tools.read(request.tools, "$.tools")
    found = merge_findings((read.found, in_system, in_messages, in_tools))
    refuse(found)
    return WireRequest(
        conversation=Conversation(
            model=request.model,
            messages=(*system, *chain.from_iterable(messages)),
            tools=tools,
            sampling=_sampling(request),
            stream=request.stream or False,
        ),
        fingerprint=read.fingerprint,
        overridden=found.overridden,
        unlisted=found.unlisted,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The request, as far as it is read
# ---------------------------------------------------------------------------------------------------------------------


class _Text(Struct, tag="text"):
    text: str


class _Thinking(Struct, tag="thinking"):
    thinking: str


class _RedactedThinking(Struct, tag="redacted_thinking"):
    pass


class _ToolUse(Struct, tag="tool_use"):
    id: str
    name: str
    input: Raw


class _ToolReference(Struct, tag="tool_reference"):
    tool_name: str


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text | _ToolReference] | None = None


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text | _ToolResult]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Thinking | _RedactedThinking | _ToolUse]


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class _ToolChoice(Struct):
    type: str
    name: str = ""


class _Request(Struct):
    model: str
    messages: list[Raw]
    system: Raw = Raw(b"null")
    tools: Raw = Raw(b"null")
    stream: bool | None = None
    max_tokens: TokenLimit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tool_choice: _ToolChoice | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Request -> Conversation
# ---------------------------------------------------------------------------------------------------------------------


def _system_messages(content: str | list[_Text] | None) -> tuple[Message, ...]:
    texts = [content] if isinstance(content, str) else [block.text for block in content or ()]
    text = join_blocks(map(_without_billing, texts))
    return (Message(role="system", text=text),) if text else ()


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_PREFIX) else text


def _read_message(message: _System | _User | _Assistant) -> tuple[Message, ...]:
    match message:
        case _User(content=content):
            return tuple(_user_messages(content))
        case _Assistant(content=content):
            return (_assistant_message(content),)
        case _System(content=content):
            return (Message(role="system", text=_join(content)),)


def _user_messages(content: str | list[_Text | _ToolResult]) -> Iterator[Message]:
    blocks = [_Text(text=content)] if isinstance(content, str) else content
    return split_at_results(blocks, _result, lambda block: block.text if isinstance(block, _Text) else "")


def _result(block: _Text | _ToolResult) -> Message | None:
    if isinstance(block, _Text):
        return None
    return Message(role="tool", text=_join(block.content), tool_call_id=block.tool_use_id)


def _assistant_message(content: str | list[_Text | _Thinking | _RedactedThinking | _ToolUse]) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", text=_join(content))
    return Message(
        role="assistant",
        text=join_blocks(block.text for block in content if isinstance(block, _Text)),
        thinking=join_blocks(block.thinking for block in content if isinstance(block, _Thinking)),
        tool_calls=tuple(_tool_call(block) for block in content if isinstance(block, _ToolUse)),
    )


def _join(content: str | Sequence[_Text | _ToolReference] | None) -> str:
    if isinstance(content, str):
        return join_blocks([content])
    return join_blocks(block.text if isinstance(block, _Text) else block.tool_name for block in content or ())


def _tool_call(block: _ToolUse) -> ToolCall:
    arguments = bytes(block.input).decode()
    if not arguments.startswith("{"):
        raise invalid(f"the input of tool call {block.id!r} is not an object")
    return ToolCall(id=block.id, name=block.name, arguments=arguments)


def _read_tools(tools: list[_Tool] | None) -> tuple[Tool, ...]:
    return tuple(_read_tool(tool, f"$.tools[{index}]") for index, tool in enumerate(tools or ()))


def _read_tool(tool: _Tool, place: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise invalid(f"tool {tool.name!r} of type {tool.type!r} is not supported: {AT_PROVIDER} - at `{place}.type`")
    if tool.input_schema is None:
        raise invalid(f"Object missing required field `input_schema` - at `{place}`")
    return Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)


def _sampling(request: _Request) -> Sampling:
    return Sampling(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(request.stop_sequences or ()),
        tool_choice=_tool_choice(request.tool_choice),
    )


def _tool_choice(choice: _ToolChoice | None) -> str:
    match choice:
        case None:
            return "auto"
        case _ToolChoice(type="any"):
            return "required"
        case _ToolChoice(type="tool"):
            return f"tool:{choice.name}"
        case _:
            return choice.type


_body = BodyReader(_Request, FIELDS, pieces=frozenset({"system", "messages", "tools"}))
_system = PieceReader(str | list[_Text] | None, _system_messages, FIELDS, "system")
_messages = PieceReader(_System | _User | _Assistant, _read_message, FIELDS, "messages[]")
_tools = PieceReader(list[_Tool] | None, _read_tools, FIELDS, "tools")
