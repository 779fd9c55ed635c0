"""OpenAI Chat Completions: https://platform.openai.com/docs/api-reference/chat, as harnesses use it.

Choices where the API leaves them open:

- `developer` is `system`.
- Reasoning travels as `reasoning_content`, as with vLLM, DeepSeek and Qwen; `reasoning` is read too.
- Only one choice is drawn: `n` over 1 is refused.
- The keep-alive is a chunk with an empty delta, after the chunk that gives the role.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from clawhpc.records import Conversation, Message, Reply, Sampling, Tool, ToolCall, Usage
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
    server_sent_event,
)

DONE = b"data: [DONE]\n\n"

ERRORS: dict[ErrorKind, tuple[int, str, str | None]] = {
    ErrorKind.INVALID: (400, "invalid_request_error", None),
    ErrorKind.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    ErrorKind.TOO_LARGE: (413, "invalid_request_error", "request_too_large"),
    ErrorKind.CONTEXT: (400, "invalid_request_error", "context_length_exceeded"),
    ErrorKind.LIMIT: (400, "invalid_request_error", "rollout_limit_reached"),
    ErrorKind.OVERLOADED: (503, "server_error", "overloaded"),
}
"""Kind -> status, type, code."""


@dataclass(frozen=True, kw_only=True)
class ChatForm:
    """How the answer to one request is written."""

    usage_in_stream: bool = False
    """`stream_options.include_usage`: the stream ends with a chunk that carries the usage."""


class OpenAIChat:
    """The Chat Completions API."""

    name = "openai_chat"

    def parse_request(self, body: bytes) -> WireRequest:
        """Read a body of `/v1/chat/completions`."""
        request = decode_body(body, _request_decoder)
        if not request.messages:
            raise invalid("messages: at least one message is required")
        if request.n not in (None, 1):
            raise invalid("n: only one choice can be drawn")
        return WireRequest(
            conversation=Conversation(
                model=request.model,
                messages=tuple(map(_message, request.messages)),
                tools=_parse_tools(bytes(request.tools)),
                sampling=_sampling(request),
                stream=request.stream or False,
            ),
            fingerprint=fingerprint(body),
            form=ChatForm(usage_in_stream=bool(request.stream_options and request.stream_options.include_usage)),
        )

    def reply_body(self, head: ReplyHead, reply: Reply, usage: Usage) -> Json:
        """A `ChatCompletion`."""
        message: Json = {"role": "assistant", "content": _content(reply), "refusal": None, **_reasoning(reply)}
        if reply.tool_calls:
            message["tool_calls"] = [_tool_call_json(call) for call in reply.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
        return {**_completion(head, "chat.completion"), "choices": [choice], "usage": _usage(usage)}

    def opening_event(self, head: ReplyHead) -> bytes:
        """The chunk that gives the role."""
        return _chunk(head, {"role": "assistant", "content": ""})

    def keep_alive_event(self, head: ReplyHead) -> bytes:
        """A chunk with an empty delta."""
        return _chunk(head, {})

    def turn_events(self, head: ReplyHead, reply: Reply, usage: Usage) -> Iterator[bytes]:
        """Reasoning, text and tool calls in one chunk each, the finish reason, the usage where it was asked for."""
        if reply.thinking:
            yield _chunk(head, _reasoning(reply))
        if reply.text:
            yield _chunk(head, {"content": reply.text})
        if reply.tool_calls:
            calls = [{"index": at, **_tool_call_json(call)} for at, call in enumerate(reply.tool_calls)]
            yield _chunk(head, {"tool_calls": calls})
        yield _chunk(head, {}, reply.finish_reason)
        if head.form.usage_in_stream:
            last = {**_completion(head, "chat.completion.chunk"), "choices": [], "usage": _usage(usage)}
            yield server_sent_event(last)
        yield DONE

    def error_body(self, error: WireError) -> tuple[int, Json]:
        """The API's own error object. Harnesses compact when they read the code or the message of an overflow."""
        status, error_type, code = ERRORS[error.kind]
        message, param = str(error), None
        if isinstance(error, ContextOverflow):
            message, param = _overflow_message(error), "messages"
        return status, {"error": {"message": message, "type": error_type, "param": param, "code": code}}

    def error_event(self, error: WireError) -> bytes:
        """The error object in place of a chunk."""
        return server_sent_event(self.error_body(error)[1])

    def models_body(self, model: str) -> Json:
        """The list of models: one."""
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "clawhpc"}]}


# ---------------------------------------------------------------------------------------------------------------------
# The request, as far as it is read
# ---------------------------------------------------------------------------------------------------------------------


class _Text(Struct, tag="text"):
    text: str


class _Refusal(Struct, tag="refusal"):
    refusal: str


class _FunctionCall(Struct):
    name: str
    arguments: str | None = None


class _ToolCall(Struct):
    function: _FunctionCall
    type: Literal["function"] = "function"
    id: str | None = None


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[_Text]


class _Developer(_System, tag="developer"):
    pass


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Refusal] | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _ToolMessage(Struct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[_Text] | None = None


_Message = _System | _Developer | _User | _Assistant | _ToolMessage


class _Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Struct):
    function: _Function
    type: Literal["function"] = "function"


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _NamedFunction(Struct):
    name: str


class _ToolChoice(Struct):
    function: _NamedFunction


class _Request(Struct):
    model: str
    messages: list[_Message]
    tools: Raw = Raw(b"null")
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    tool_choice: str | _ToolChoice | None = None


_request_decoder = msgspec.json.Decoder(_Request)
_tools_decoder = msgspec.json.Decoder(list[_Tool] | None)


# ---------------------------------------------------------------------------------------------------------------------
# Request -> Conversation
# ---------------------------------------------------------------------------------------------------------------------


def _message(message: _Message) -> Message:
    text = _join(message.content)
    match message:
        case _System():
            return Message(role="system", text=text)
        case _User():
            return Message(role="user", text=text)
        case _Assistant(tool_calls=calls):
            thinking = message.reasoning_content or message.reasoning or ""
            return Message(
                role="assistant", text=text, thinking=thinking, tool_calls=tuple(map(_tool_call, calls or ()))
            )
        case _ToolMessage(tool_call_id=call_id):
            return Message(role="tool", text=text, tool_call_id=call_id)


def _join(content: str | list[Any] | None) -> str:
    if isinstance(content, str):
        return content
    return join_blocks(part.text if isinstance(part, _Text) else part.refusal for part in content or ())


def _tool_call(call: _ToolCall) -> ToolCall:
    return ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments or "")


@lru_cache(maxsize=64)
def _parse_tools(tools: bytes) -> tuple[Tool, ...]:
    """A harness sends the same tens of kilobytes with every request."""
    functions = [tool.function for tool in decode_body(tools, _tools_decoder, "$.tools") or ()]
    return tuple(
        Tool(name=function.name, description=function.description or "", parameters=function.parameters or {})
        for function in functions
    )


def _sampling(request: _Request) -> Sampling:
    return Sampling(
        max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        tool_choice=_tool_choice(request.tool_choice),
    )


def _tool_choice(choice: str | _ToolChoice | None) -> str:
    return f"tool:{choice.function.name}" if isinstance(choice, _ToolChoice) else choice or "auto"


# ---------------------------------------------------------------------------------------------------------------------
# Reply -> body and events
# ---------------------------------------------------------------------------------------------------------------------


def _completion(head: ReplyHead, kind: str) -> Json:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _chunk(head: ReplyHead, delta: Json, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk: Json = {**_completion(head, "chat.completion.chunk"), "choices": [choice]}
    if head.form.usage_in_stream:
        chunk["usage"] = None
    return server_sent_event(chunk)


def _content(reply: Reply) -> str | None:
    return None if reply.tool_calls and not reply.text else reply.text


def _reasoning(reply: Reply) -> Json:
    return {"reasoning_content": reply.thinking} if reply.thinking else {}


def _tool_call_json(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _overflow_message(error: ContextOverflow) -> str:
    return (
        f"This model's maximum context length is {error.maximum} tokens. However, your messages resulted in "
        f"{error.num_tokens} tokens. Please reduce the length of the messages."
    )
