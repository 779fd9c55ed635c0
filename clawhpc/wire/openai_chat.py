"""OpenAI Chat Completions: https://platform.openai.com/docs/api-reference/chat, as harnesses use it.

Choices where the API leaves them open:

- `developer` is `system`.
- Reasoning travels as `reasoning_content`, as with vLLM, DeepSeek and Qwen; `reasoning` is read too.
- Only one choice is drawn: `n` over 1 is refused.
- The keep-alive is a chunk with an empty delta, after the chunk that gives the role.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clawhpc.records import Conversation, Message, Reply, Sampling, Tool, ToolCall, Usage
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
    read,
    read_key,
    read_object,
    server_sent_event,
    unsupported,
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


class OpenAIChat:
    """The Chat Completions API."""

    name = "openai_chat"

    def parse_request(self, body: object) -> WireRequest:
        """Read a body of `/v1/chat/completions`."""
        request = read_object(body, "body")
        given = read_key(request, "messages", list, "", REQUIRED)
        if not given:
            raise invalid("messages: at least one message is required")
        if read_key(request, "n", int, "", 1) != 1:
            raise invalid("n: only one choice can be drawn")
        options = read_key(request, "stream_options", dict, "", {})
        tools = read_key(request, "tools", list, "", [])
        return WireRequest(
            conversation=Conversation(
                model=read_key(request, "model", str, "", REQUIRED),
                messages=tuple(_message(item, f"messages.{at}") for at, item in enumerate(given)),
                tools=tuple(_tool(item, f"tools.{at}") for at, item in enumerate(tools)),
                sampling=_sampling(request),
                stream=read_key(request, "stream", bool, "", False),
            ),
            usage_in_stream=read_key(options, "include_usage", bool, "stream_options.", False),
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
        if head.usage_in_stream:
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
# Request -> Conversation
# ---------------------------------------------------------------------------------------------------------------------


def _message(item: object, where: str) -> Message:
    message = read_object(item, where)
    place = f"{where}."
    text = _text(message.get("content"), place)
    match message.get("role"):
        case "system" | "developer":
            return Message(role="system", text=text)
        case "user":
            return Message(role="user", text=text)
        case "assistant":
            return _assistant_message(message, text, place)
        case "tool":
            call_id = read_key(message, "tool_call_id", str, place, REQUIRED)
            return Message(role="tool", text=text, tool_call_id=call_id)
        case role:
            raise invalid(f"{where}.role: {role!r} is not one of 'system', 'developer', 'user', 'assistant', 'tool'")


def _assistant_message(message: Mapping[str, Any], text: str, where: str) -> Message:
    thinking = read_key(message, "reasoning_content", str, where, "") or read_key(message, "reasoning", str, where, "")
    calls = read_key(message, "tool_calls", list, where, [])
    tool_calls = tuple(_tool_call(call, f"{where}tool_calls.{at}") for at, call in enumerate(calls))
    return Message(role="assistant", text=text, thinking=thinking, tool_calls=tool_calls)


def _text(content: object, where: str) -> str:
    """A string, null, or parts that hold nothing but text."""
    if isinstance(content, str):
        return content
    texts = []
    for at, item in enumerate(read([] if content is None else content, list, f"{where}content")):
        place = f"{where}content.{at}"
        part = read_object(item, place)
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise unsupported(kind, place)
        texts.append(read_key(part, kind, str, f"{place}.", REQUIRED))
    return join_blocks(texts)


def _tool_call(item: object, where: str) -> ToolCall:
    call = _function_of(item, where)
    function = read_key(call, "function", dict, f"{where}.", REQUIRED)
    return ToolCall(
        id=read_key(call, "id", str, f"{where}.", ""),
        name=read_key(function, "name", str, f"{where}.function.", REQUIRED),
        arguments=read_key(function, "arguments", str, f"{where}.function.", ""),
    )


def _tool(item: object, where: str) -> Tool:
    function = read_key(_function_of(item, where), "function", dict, f"{where}.", REQUIRED)
    return Tool(
        name=read_key(function, "name", str, f"{where}.function.", REQUIRED),
        description=read_key(function, "description", str, f"{where}.function.", ""),
        parameters=read_key(function, "parameters", dict, f"{where}.function.", {}),
    )


def _function_of(item: object, where: str) -> Mapping[str, Any]:
    found = read_object(item, where)
    if found.get("type", "function") != "function":
        raise invalid(f"{where}: tools of type {found['type']!r} are not supported, only functions")
    return found


def _sampling(request: Mapping[str, Any]) -> Sampling:
    stop = request.get("stop")
    stops = [stop] if isinstance(stop, str) else read_key(request, "stop", list, "", [])
    old_name = read_key(request, "max_tokens", int, "", None)
    return Sampling(
        max_tokens=read_key(request, "max_completion_tokens", int, "", old_name),
        temperature=read_key(request, "temperature", (int, float), "", None),
        top_p=read_key(request, "top_p", (int, float), "", None),
        top_k=read_key(request, "top_k", int, "", None),
        stop=tuple(read(text, str, "stop") for text in stops),
        tool_choice=_tool_choice(request.get("tool_choice")),
    )


def _tool_choice(choice: object) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return choice
    named = read_key(read_object(choice, "tool_choice"), "function", dict, "tool_choice.", {})
    return f"tool:{named.get('name')}"


# ---------------------------------------------------------------------------------------------------------------------
# Reply -> body and events
# ---------------------------------------------------------------------------------------------------------------------


def _completion(head: ReplyHead, kind: str) -> Json:
    return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model}


def _chunk(head: ReplyHead, delta: Json, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    chunk: Json = {**_completion(head, "chat.completion.chunk"), "choices": [choice]}
    if head.usage_in_stream:
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
