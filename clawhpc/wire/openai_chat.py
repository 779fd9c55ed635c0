"""OpenAI Chat Completions: https://platform.openai.com/docs/api-reference/chat, as harnesses use it.

`openai_chat_request` reads what is asked. The keep-alive is a chunk with an empty delta, after the chunk that gives
the role.
"""

from __future__ import annotations

from collections.abc import Iterator

from clawhpc.records import Reply, ToolCall, Usage
from clawhpc.wire.base import Json, ReplyHead, WireError, WireRequest, server_sent_event
from clawhpc.wire.openai_chat_request import FIELDS, read_request
from clawhpc.wire.openai_errors import openai_error

DONE = b"data: [DONE]\n\n"


class OpenAIChat:
    """The Chat Completions API."""

    name = "openai_chat"
    fields = FIELDS

    def parse_request(self, body: bytes) -> WireRequest:
        """Read a body of `/v1/chat/completions`."""
        return read_request(body)

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
        """The API's own error object."""
        return openai_error(error, "messages")

    def error_event(self, head: ReplyHead, error: WireError) -> bytes:
        """The error object in place of a chunk."""
        return server_sent_event(self.error_body(error)[1])

    def models_body(self, model: str) -> Json:
        """The list of models: one."""
        return {"object": "list", "data": [self.model_body(model)]}

    def model_body(self, model: str) -> Json:
        """What there is to know of the model."""
        return {"id": model, "object": "model", "created": 0, "owned_by": "clawhpc"}


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
