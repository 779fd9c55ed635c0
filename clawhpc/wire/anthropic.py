"""Anthropic Messages: https://docs.anthropic.com/en/api/messages, as harnesses use it.

`anthropic_request` reads what is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clawhpc.records import FinishReason, Reply, Usage
from clawhpc.wire.anthropic_request import FIELDS, read_request
from clawhpc.wire.base import (
    ContextOverflow,
    ErrorKind,
    FieldUnlisted,
    Json,
    ReplyHead,
    WireError,
    WireRequest,
    parse_arguments,
    server_sent_event,
)

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
    fields = FIELDS

    def parse_request(self, body: bytes) -> WireRequest:
        """Read a body of `/v1/messages` or `/v1/messages/count_tokens`."""
        return read_request(body)

    def reply_body(self, head: ReplyHead, reply: Reply, usage: Usage) -> Json:
        """A `Message`."""
        return {
            **_empty_message(head),
            "content": _content(reply),
            **_stop(reply),
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
        for index, (start, deltas) in enumerate(_growing_content(reply)):
            yield _event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_stop(reply), usage=_usage(usage))
        yield _event("message_stop")

    def error_body(self, error: WireError) -> tuple[int, Json]:
        """The API's own error object. Claude Code compacts when it reads `prompt is too long`."""
        status, error_type = ERRORS[error.kind]
        message = str(error)
        if isinstance(error, ContextOverflow):
            message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum} maximum"
        elif isinstance(error, FieldUnlisted):
            message = f"{error.path}: Extra inputs are not permitted"
        return status, {"type": "error", "error": {"type": error_type, "message": message}}

    def error_event(self, head: ReplyHead, error: WireError) -> bytes:
        """`error`."""
        return server_sent_event(self.error_body(error)[1], "error")

    def count_body(self, num_tokens: int) -> Json:
        """The answer to `/v1/messages/count_tokens`."""
        return {"input_tokens": num_tokens}

    def models_body(self, model: str) -> Json:
        """The list of models: one."""
        return {"data": [self.model_body(model)], "has_more": False, "first_id": model, "last_id": model}

    def model_body(self, model: str) -> Json:
        """What there is to know of the model."""
        known = {"display_name": model, "created_at": "2026-01-01T00:00:00Z", "lifecycle": "active"}
        return {"type": "model", "id": model, **known}


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


def _stop(reply: Reply) -> Json:
    if reply.stop_sequence and not reply.tool_calls:  # a harness runs the calls of `tool_use` only
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_sequence}
    return {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}


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


def _growing_content(reply: Reply) -> Iterator[tuple[Json, list[Json]]]:
    """Each block as it starts, and what fills it. The input of a tool comes as it was drawn."""
    if reply.thinking:
        filled = [{"type": "thinking_delta", "thinking": reply.thinking}, {"type": "signature_delta", "signature": ""}]
        yield {"type": "thinking", "thinking": "", "signature": ""}, filled
    if reply.text:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": reply.text}]
    for call in reply.tool_calls:
        filled = [{"type": "input_json_delta", "partial_json": call.arguments}]
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, filled


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
