"""Anthropic Messages: https://docs.anthropic.com/en/api/messages, as harnesses use it.

Choices where the API leaves them open:

- The line `x-anthropic-billing-header: …`, which Claude Code puts first into `system`, is no part of the prompt: it
  holds a nonce, and would give every conversation a root of its own.
- `system` messages inside `messages` stay where they stand.
- `cache_control`, citations, signatures and redacted reasoning are dropped: they mean nothing to this model.
- `is_error` of a tool result is dropped: harnesses say in the text that the tool failed.
- Text after a tool call joins the text before it, which is what Claude Code makes of it on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from clawhpc.records import Conversation, FinishReason, Message, Reply, Sampling, Tool, ToolCall, Usage
from clawhpc.wire.base import (
    REQUIRED,
    ContextOverflow,
    ErrorKind,
    Json,
    ReplyHead,
    WireError,
    WireRequest,
    invalid,
    join_blocks,
    parse_arguments,
    read,
    read_key,
    read_object,
    server_sent_event,
    unsupported,
)

BILLING_PREFIX = "x-anthropic-billing-header:"

STOP_REASONS: dict[FinishReason, str] = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}

ERRORS: dict[ErrorKind, tuple[int, str]] = {
    ErrorKind.INVALID: (400, "invalid_request_error"),
    ErrorKind.NOT_FOUND: (404, "not_found_error"),
    ErrorKind.TOO_LARGE: (413, "request_too_large"),
    ErrorKind.CONTEXT: (400, "invalid_request_error"),
    ErrorKind.LIMIT: (400, "invalid_request_error"),
    ErrorKind.OVERLOADED: (529, "overloaded_error"),
}


class Anthropic:
    """The Messages API."""

    name = "anthropic"

    def parse_request(self, body: object) -> WireRequest:
        """Read a body of `/v1/messages` or `/v1/messages/count_tokens`."""
        request = read_object(body, "body")
        given = read_key(request, "messages", list, "", REQUIRED)
        messages = [message for at, item in enumerate(given) for message in _messages(item, f"messages.{at}")]
        if not messages:
            raise invalid("messages: at least one message is required")
        return WireRequest(
            conversation=Conversation(
                model=read_key(request, "model", str, "", REQUIRED),
                messages=(*_system(request), *messages),
                tools=tuple(
                    _tool(tool, f"tools.{at}") for at, tool in enumerate(read_key(request, "tools", list, "", []))
                ),
                sampling=_sampling(request),
                stream=read_key(request, "stream", bool, "", False),
            )
        )

    def reply_body(self, head: ReplyHead, reply: Reply, usage: Usage) -> Json:
        """A `Message`."""
        return {
            **_empty_message(head),
            "content": _content(reply),
            "stop_reason": STOP_REASONS[reply.finish_reason],
            "usage": _usage(usage),
        }

    def opening_event(self, head: ReplyHead) -> bytes:
        """`message_start`. How much of the input comes from the engine's cache is known only in `message_delta`."""
        usage = _usage(Usage(input_tokens=head.input_tokens, output_tokens=0))
        return _event("message_start", message={**_empty_message(head), "usage": usage})

    def keep_alive_event(self, head: ReplyHead) -> bytes:
        """`ping`."""
        return _event("ping")

    def turn_events(self, head: ReplyHead, reply: Reply, usage: Usage) -> Iterator[bytes]:
        """Each content block in one delta, then `message_delta` and `message_stop`."""
        for index, block in enumerate(_content(reply)):
            start, deltas = _block_events(block)
            yield _event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        stop = {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}
        yield _event("message_delta", delta=stop, usage=_usage(usage))
        yield _event("message_stop")

    def error_body(self, error: WireError) -> tuple[int, Json]:
        """The API's own error object. Claude Code compacts when it reads `prompt is too long`."""
        status, error_type = ERRORS[error.kind]
        message = str(error)
        if isinstance(error, ContextOverflow):
            message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum} maximum"
        return status, {"type": "error", "error": {"type": error_type, "message": message}}

    def error_event(self, error: WireError) -> bytes:
        """`error`."""
        return server_sent_event(self.error_body(error)[1], "error")


# ---------------------------------------------------------------------------------------------------------------------
# Request -> Conversation
# ---------------------------------------------------------------------------------------------------------------------


def _system(request: Mapping[str, Any]) -> Iterator[Message]:
    text = join_blocks(_without_billing(text) for text in _texts(request.get("system"), "system"))
    if text:
        yield Message(role="system", text=text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_PREFIX) else text


def _messages(item: object, where: str) -> Iterator[Message]:
    message = read_object(item, where)
    content = message.get("content")
    match message.get("role"):
        case "user":
            yield from _user_messages(content, where)
        case "assistant":
            yield _assistant_message(_blocks(content, where), where)
        case "system":
            yield Message(role="system", text=join_blocks(_texts(content, where)))
        case role:
            raise invalid(f"{where}.role: {role!r} is not one of 'user', 'assistant', 'system'")


def _user_messages(content: object, where: str) -> Iterator[Message]:
    """Tool results become messages of their own; the text between them stays between them."""
    texts: list[str] = []
    blocks = _blocks(content, where)
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        match block.get("type"):
            case "text":
                texts.append(read_key(block, "text", str, f"{place}.", REQUIRED))
            case "tool_result":
                if text := join_blocks(texts):
                    yield Message(role="user", text=text)
                texts = []
                yield _tool_result(block, place)
            case kind:
                raise unsupported(kind, place)
    text = join_blocks(texts)
    if text or not any(block["type"] == "tool_result" for block in blocks):
        yield Message(role="user", text=text)


def _tool_result(block: Mapping[str, Any], where: str) -> Message:
    return Message(
        role="tool",
        text=join_blocks(_texts(block.get("content"), where)),
        tool_call_id=read_key(block, "tool_use_id", str, f"{where}.", REQUIRED),
    )


def _assistant_message(blocks: Sequence[Mapping[str, Any]], where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}."
        match block.get("type"):
            case "text":
                texts.append(read_key(block, "text", str, place, REQUIRED))
            case "thinking":
                thoughts.append(read_key(block, "thinking", str, place, REQUIRED))
            case "tool_use":
                calls.append(_tool_call(block, place))
            case "redacted_thinking":
                pass
            case kind:
                raise unsupported(kind, place)
    return Message(role="assistant", text=join_blocks(texts), thinking=join_blocks(thoughts), tool_calls=tuple(calls))


def _tool_call(block: Mapping[str, Any], where: str) -> ToolCall:
    return ToolCall(
        id=read_key(block, "id", str, where, REQUIRED),
        name=read_key(block, "name", str, where, REQUIRED),
        arguments=msgspec.json.encode(read_key(block, "input", dict, where, {})).decode(),
    )


def _blocks(content: object, where: str) -> list[Mapping[str, Any]]:
    """A string is one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    items = read(content, list, f"{where}.content")
    return [read_object(item, f"{where}.content.{at}") for at, item in enumerate(items)]


def _texts(content: object, where: str) -> list[str]:
    """The texts of content that may hold nothing else."""
    texts = []
    for at, block in enumerate(_blocks([] if content is None else content, where)):
        place = f"{where}.content.{at}"
        if block.get("type") != "text":
            raise unsupported(block.get("type"), place)
        texts.append(read_key(block, "text", str, f"{place}.", REQUIRED))
    return texts


def _tool(item: object, where: str) -> Tool:
    tool = read_object(item, where)
    if tool.get("type", "custom") not in ("custom", None):
        raise invalid(f"{where}: tools of type {tool['type']!r} run at the provider, and are not supported")
    return Tool(
        name=read_key(tool, "name", str, f"{where}.", REQUIRED),
        description=read_key(tool, "description", str, f"{where}.", ""),
        parameters=read_key(tool, "input_schema", dict, f"{where}.", REQUIRED),
    )


def _sampling(request: Mapping[str, Any]) -> Sampling:
    return Sampling(
        max_tokens=read_key(request, "max_tokens", int, "", None),
        temperature=read_key(request, "temperature", (int, float), "", None),
        top_p=read_key(request, "top_p", (int, float), "", None),
        top_k=read_key(request, "top_k", int, "", None),
        stop=tuple(read(stop, str, "stop_sequences") for stop in read_key(request, "stop_sequences", list, "", [])),
        tool_choice=_tool_choice(read_key(request, "tool_choice", dict, "", {})),
    )


def _tool_choice(choice: Mapping[str, Any]) -> str:
    match choice.get("type", "auto"):
        case "any":
            return "required"
        case "tool":
            return f"tool:{choice.get('name')}"
        case kind:
            return str(kind)


# ---------------------------------------------------------------------------------------------------------------------
# Reply -> body and events
# ---------------------------------------------------------------------------------------------------------------------


def _empty_message(head: ReplyHead) -> Json:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _content(reply: Reply) -> list[Json]:
    """Reasoning, text, tool calls, in the order in which the API has them; nothing at all for an empty reply."""
    blocks: list[Json] = []
    if reply.thinking:
        blocks.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": parse_arguments(call.arguments)})
    return blocks


def _block_events(block: Json) -> tuple[Json, list[Json]]:
    """A block as it starts, and what fills it."""
    match block["type"]:
        case "thinking":
            filled = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            return {**block, "thinking": ""}, [*filled, {"type": "signature_delta", "signature": ""}]
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            arguments = msgspec.json.encode(block["input"]).decode()
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _usage(usage: Usage) -> Json:
    """The API counts cached input apart."""
    return {
        "input_tokens": usage.input_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent_event({"type": kind, **fields}, kind)
