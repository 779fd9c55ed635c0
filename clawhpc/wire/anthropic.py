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

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from clawhpc.records import Conversation, FinishReason, Message, Reply, Sampling, Tool, ToolCall, Usage
from clawhpc.wire.base import (
    ContextOverflow,
    ErrorKind,
    Json,
    ReplyHead,
    WireError,
    WireRequest,
    decode_body,
    fingerprint,
    invalid,
    join_blocks,
    parse_arguments,
    server_sent_event,
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

    def parse_request(self, body: bytes) -> WireRequest:
        """Read a body of `/v1/messages` or `/v1/messages/count_tokens`."""
        request = decode_body(body, _request_decoder)
        if not request.messages:
            raise invalid("messages: at least one message is required")
        messages = [message for given in request.messages for message in _messages(given)]
        return WireRequest(
            conversation=Conversation(
                model=request.model,
                messages=(*_system(request.system), *messages),
                tools=_parse_tools(bytes(request.tools)),
                sampling=_sampling(request),
                stream=request.stream or False,
            ),
            fingerprint=fingerprint(body),
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


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text | _ToolResult]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Thinking | _RedactedThinking | _ToolUse]


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class _ToolChoice(Struct):
    type: str
    name: str = ""


class _Request(Struct):
    model: str
    messages: list[_System | _User | _Assistant]
    system: str | list[_Text] | None = None
    tools: Raw = Raw(b"null")
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tool_choice: _ToolChoice | None = None


_request_decoder = msgspec.json.Decoder(_Request)
_tools_decoder = msgspec.json.Decoder(list[_Tool] | None)


# ---------------------------------------------------------------------------------------------------------------------
# Request -> Conversation
# ---------------------------------------------------------------------------------------------------------------------


def _system(content: str | list[_Text] | None) -> Iterator[Message]:
    texts = [content] if isinstance(content, str) else [block.text for block in content or ()]
    text = join_blocks(map(_without_billing, texts))
    if text:
        yield Message(role="system", text=text)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_PREFIX) else text


def _messages(message: _System | _User | _Assistant) -> Iterator[Message]:
    match message:
        case _User(content=content):
            yield from _user_messages(content)
        case _Assistant(content=content):
            yield _assistant_message(content)
        case _System(content=content):
            yield Message(role="system", text=_join(content))


def _user_messages(content: str | list[_Text | _ToolResult]) -> Iterator[Message]:
    """Tool results become messages of their own; the text between them stays between them."""
    if isinstance(content, str):
        yield Message(role="user", text=_join(content))
        return
    texts: list[str] = []
    for block in content:
        if isinstance(block, _Text):
            texts.append(block.text)
            continue
        if text := join_blocks(texts):
            yield Message(role="user", text=text)
        texts = []
        yield Message(role="tool", text=_join(block.content), tool_call_id=block.tool_use_id)
    text = join_blocks(texts)
    if text or all(isinstance(block, _Text) for block in content):
        yield Message(role="user", text=text)


def _assistant_message(content: str | list[_Text | _Thinking | _RedactedThinking | _ToolUse]) -> Message:
    if isinstance(content, str):
        return Message(role="assistant", text=_join(content))
    return Message(
        role="assistant",
        text=join_blocks(block.text for block in content if isinstance(block, _Text)),
        thinking=join_blocks(block.thinking for block in content if isinstance(block, _Thinking)),
        tool_calls=tuple(_tool_call(block) for block in content if isinstance(block, _ToolUse)),
    )


def _join(content: str | list[_Text] | None) -> str:
    return join_blocks([content] if isinstance(content, str) else [block.text for block in content or ()])


def _tool_call(block: _ToolUse) -> ToolCall:
    arguments = bytes(block.input).decode()
    if not arguments.startswith("{"):
        raise invalid(f"the input of tool call {block.id!r} is not an object")
    return ToolCall(id=block.id, name=block.name, arguments=arguments)


@lru_cache(maxsize=64)
def _parse_tools(tools: bytes) -> tuple[Tool, ...]:
    """A harness sends the same tens of kilobytes with every request."""
    return tuple(
        Tool(name=tool.name, description=tool.description or "", parameters=tool.input_schema)
        for tool in decode_body(tools, _tools_decoder, "$.tools") or ()
    )


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
