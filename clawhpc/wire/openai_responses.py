"""OpenAI Responses: https://platform.openai.com/docs/api-reference/responses, as Codex uses it.

`openai_responses_request` reads what is asked. The keep-alive is the second event of the stream once more, number and
all: what counts events sees none twice, and what waits for one sees that somebody is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from clawhpc.records import Reply, ToolCall, Usage
from clawhpc.wire.base import ErrorKind, Json, ReplyHead, WireError, WireRequest, server_sent_event
from clawhpc.wire.openai_errors import openai_error
from clawhpc.wire.openai_responses_request import FIELDS, close_reasoning, read_request
from clawhpc.wire.openai_responses_tools import OfferedTool, freeform_call

NUM_OPENING = 2
"""Events before the turn."""


class OpenAIResponses:
    """The Responses API."""

    name = "openai_responses"
    fields = FIELDS

    def parse_request(self, body: bytes) -> WireRequest:
        """Read a body of `/v1/responses`."""
        return read_request(body)

    def reply_body(self, head: ReplyHead, reply: Reply, usage: Usage) -> Json:
        """A `Response`."""
        cut = reply.finish_reason == "length"
        return {
            **_response(head, "incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(head, reply),
            "usage": _usage(usage),
        }

    def opening_event(self, head: ReplyHead) -> bytes:
        """`response.created` and `response.in_progress`."""
        created = {"type": "response.created", "response": _response(head, "in_progress")}
        return _event(created, 0) + self.keep_alive_event(head)

    def keep_alive_event(self, head: ReplyHead) -> bytes:
        """`response.in_progress`, as it was sent before."""
        return _event({"type": "response.in_progress", "response": _response(head, "in_progress")}, NUM_OPENING - 1)

    def turn_events(self, head: ReplyHead, reply: Reply, usage: Usage) -> Iterator[bytes]:
        """Each item in one delta, then `response.completed`, or `response.incomplete` where the length cut it."""
        response = self.reply_body(head, reply, usage)
        items = (_item_events(item, index) for index, item in enumerate(response["output"]))
        last = {"type": f"response.{response['status']}", "response": response}
        for number, event in enumerate(chain(*items, [last]), start=NUM_OPENING):
            yield _event(event, number)

    def error_body(self, error: WireError) -> tuple[int, Json]:
        """The API's own error object."""
        return openai_error(error, "input")

    def error_event(self, head: ReplyHead, error: WireError) -> bytes:
        """`response.failed`. Codex knows an overflow by its code, and tries again after a `server_error`."""
        told = self.error_body(error)[1]["error"]
        code = told["code"] if error.kind is ErrorKind.CONTEXT else "server_error"
        response = {**_response(head, "failed"), "error": {"code": code, "message": told["message"]}}
        return _event({"type": "response.failed", "response": response}, NUM_OPENING)


def _response(head: ReplyHead, status: str) -> Json:
    """A response without output. Tools and instructions are not repeated: nobody reads them."""
    return {
        "id": f"resp_{head.id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "model": head.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Items
# ---------------------------------------------------------------------------------------------------------------------


def _items(head: ReplyHead, reply: Reply) -> list[Json]:
    """Reasoning, message, calls; nothing at all for an empty reply."""
    items: list[Json] = []
    if reply.thinking:
        items.append(_reasoning(head, reply.thinking))
    if reply.text:
        items.append({"type": "message", "id": f"msg_{head.id}", "role": "assistant", "content": [_text(reply.text)]})
    calls = (_call(call, f"{head.id}_{index}", head.form.tools) for index, call in enumerate(reply.tool_calls))
    items = [{**item, "status": "completed"} for item in (*items, *calls)]
    if items and reply.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def _reasoning(head: ReplyHead, thinking: str) -> Json:
    return {
        "type": "reasoning",
        "id": f"rs_{head.id}",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": thinking}],
        "encrypted_content": close_reasoning(thinking) if head.form.encrypted_reasoning else None,
    }


def _text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: ToolCall, item_id: str, tools: dict[str, OfferedTool]) -> Json:
    tool = tools.get(call.name, OfferedTool(name=call.name))
    named = {"name": tool.name, **({"namespace": tool.namespace} if tool.namespace else {})}
    if not tool.freeform:
        arguments = {"id": f"fc_{item_id}", "call_id": call.id, "arguments": call.arguments}
        return {"type": "function_call", **arguments, **named}
    call_id, text = freeform_call(call)
    return {"type": "custom_tool_call", "id": f"ctc_{item_id}", "call_id": call_id, "input": text, **named}


# ---------------------------------------------------------------------------------------------------------------------
# Events
# ---------------------------------------------------------------------------------------------------------------------


def _item_events(item: Json, index: int) -> Iterator[Json]:
    """An item as it begins, what fills it, and the whole of it."""
    place = {"item_id": item["id"], "output_index": index}
    match item["type"]:
        case "reasoning":
            begun = {**item, "content": [], "encrypted_content": None}
            filled = _part_events("reasoning_text", item["content"][0], place, {})
        case "message":
            begun, filled = {**item, "content": []}, _part_events("output_text", item["content"][0], place, LOGPROBS)
        case "function_call":
            begun, filled = {**item, "arguments": ""}, _fill("function_call_arguments", "arguments", item, place)
        case _:
            begun, filled = {**item, "input": ""}, _fill("custom_tool_call_input", "input", item, place)
    yield {"type": "response.output_item.added", "item": {**begun, "status": "in_progress"}, "output_index": index}
    yield from filled
    yield {"type": "response.output_item.done", "item": item, "output_index": index}


LOGPROBS: Json = {"logprobs": []}


def _part_events(kind: str, part: Json, place: Json, extra: Json) -> Iterator[Json]:
    """One content part; `extra` stands in the events that carry its text."""
    at = {**place, "content_index": 0}
    yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **at}
    yield {"type": f"response.{kind}.delta", "delta": part["text"], **at, **extra}
    yield {"type": f"response.{kind}.done", "text": part["text"], **at, **extra}
    yield {"type": "response.content_part.done", "part": part, **at}


def _fill(kind: str, name: str, item: Json, place: Json) -> Iterator[Json]:
    yield {"type": f"response.{kind}.delta", "delta": item[name], **place}
    yield {"type": f"response.{kind}.done", name: item[name], **place}


def _event(event: dict[str, Any], number: int) -> bytes:
    return server_sent_event({**event, "sequence_number": number}, event["type"])
