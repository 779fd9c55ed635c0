"""Gemini generateContent: https://ai.google.dev/api/generate-content, as harnesses use it.

`gemini_request` reads what is asked. A stream is server-sent events (`alt=sse`), as every SDK asks for them. Each is a
whole response: one without text opens the stream and keeps it alive, one more has the turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from clawhpc.records import FinishReason, Reply, Usage
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
from clawhpc.wire.gemini_request import FIELDS, read_request

FINISH_REASONS: dict[FinishReason, str] = {
    "stop": "STOP",
    "tool_calls": "STOP",
    "length": "MAX_TOKENS",
    "cancelled": "OTHER",
}

ERRORS: dict[ErrorKind, tuple[int, str]] = {
    ErrorKind.INVALID: (400, "INVALID_ARGUMENT"),
    ErrorKind.NOT_FOUND: (404, "NOT_FOUND"),
    ErrorKind.TOO_LARGE: (413, "INVALID_ARGUMENT"),
    ErrorKind.CONTEXT: (400, "INVALID_ARGUMENT"),
    ErrorKind.LIMIT: (400, "FAILED_PRECONDITION"),
    ErrorKind.OVERLOADED: (503, "UNAVAILABLE"),
}


@dataclass(frozen=True)
class Gemini:
    """The API at one address: here the URL, not the body, names the model, and says whether to stream."""

    model: str = ""
    stream: bool = False

    name = "gemini"
    fields = FIELDS

    def parse_request(self, body: bytes) -> WireRequest:
        """Read a body of `generateContent`, `streamGenerateContent` or `countTokens`."""
        return read_request(body, model=self.model, stream=self.stream)

    def reply_body(self, head: ReplyHead, reply: Reply, usage: Usage) -> Json:
        """A `GenerateContentResponse`."""
        return _response(head, _parts(reply), usage, {"finishReason": FINISH_REASONS[reply.finish_reason]})

    def opening_event(self, head: ReplyHead) -> bytes:
        """A response without text, and without a reason to have ended."""
        usage = Usage(input_tokens=head.input_tokens, output_tokens=0)
        return server_sent_event(_response(head, [{"text": ""}], usage, {}))

    def keep_alive_event(self, head: ReplyHead) -> bytes:
        """The same again."""
        return self.opening_event(head)

    def turn_events(self, head: ReplyHead, reply: Reply, usage: Usage) -> Iterator[bytes]:
        """One response with all of it."""
        yield server_sent_event(self.reply_body(head, reply, usage))

    def error_body(self, error: WireError) -> tuple[int, Json]:
        """The API's own error object."""
        code, status = ERRORS[error.kind]
        return code, {"error": {"code": code, "message": _message(error), "status": status}}

    def error_event(self, head: ReplyHead, error: WireError) -> bytes:
        """The error object on a line that is no event: so the API breaks off a stream, and so its SDKs look for it."""
        return msgspec.json.encode(self.error_body(error)[1]) + b"\n"

    def count_body(self, num_tokens: int) -> Json:
        """The answer to `countTokens`."""
        return {"totalTokens": num_tokens}

    def models_body(self, model: str) -> Json:
        """The list of models: one."""
        return {"models": [self.model_body(model)]}

    def model_body(self, model: str) -> Json:
        """What there is to know of the model."""
        methods = ["generateContent", "streamGenerateContent", "countTokens"]
        return {"name": f"models/{model}", "displayName": model, "supportedGenerationMethods": methods}


def _response(head: ReplyHead, parts: list[Json], usage: Usage, ending: Json) -> Json:
    return {
        "candidates": [{"content": {"parts": parts, "role": "model"}, **ending, "index": 0}],
        "usageMetadata": _usage(usage),
        "modelVersion": head.model,
        "responseId": head.id,
    }


def _parts(reply: Reply) -> list[Json]:
    """Reasoning, text, tool calls; an empty text for an empty reply, as a content without parts counts as broken."""
    parts: list[Json] = []
    if reply.thinking:
        parts.append({"text": reply.thinking, "thought": True})
    if reply.text:
        parts.append({"text": reply.text})
    for call in reply.tool_calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": parse_arguments(call.arguments)}})
    return parts or [{"text": ""}]


def _usage(usage: Usage) -> Json:
    return {
        "promptTokenCount": usage.input_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
        "candidatesTokenCount": usage.output_tokens,
        "totalTokenCount": usage.input_tokens + usage.output_tokens,
    }


def _message(error: WireError) -> str:
    match error:
        case ContextOverflow():
            return (
                f"The input token count ({error.num_tokens}) exceeds the maximum number of tokens allowed "
                f"({error.maximum})."
            )
        case FieldUnlisted():
            return f'Invalid JSON payload received. Unknown name "{error.path}": Cannot find field.'
        case _:
            return str(error)
