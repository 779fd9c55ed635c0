"""The streams whose bytes are kept as golden files. `python -m tests.contract.wire_streams` writes them anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from clawhpc.records import Reply, ToolCall, Usage
from clawhpc.wire.base import ErrorKind, ReplyHead, WireError, WireProtocol
from clawhpc.wire.openai_chat_request import ChatForm
from clawhpc.wire.openai_responses_request import ResponsesForm
from clawhpc.wire.openai_responses_tools import OfferedTool
from clawhpc.wire.protocols import PROTOCOLS

FOLDER = Path(__file__).with_name("wire")
HEAD = ReplyHead(id="00000007", model="policy", created=1_790_000_000, input_tokens=41)
FORMS: dict[str, Any] = {
    "openai_chat": ChatForm(usage_in_stream=True),
    "openai_responses": ResponsesForm(
        tools={
            "mcp__lab__add": OfferedTool(name="add", namespace="mcp__lab"),
            "apply_patch": OfferedTool(name="apply_patch", freeform=True),
        },
        encrypted_reasoning=True,
    ),
}
USAGE = Usage(input_tokens=41, output_tokens=17, cached_tokens=32)

REPLIES = {
    "text": Reply(text="Grüße,\nworld 🦀"),
    "thinking_and_parallel_tools": Reply(
        text="\n\n",
        thinking="First look,\nthen write.",
        tool_calls=(
            ToolCall(id="toolu_1", name="Bash", arguments='{"command": "ls -l \\"a b\\"", "timeout": 1.0}'),
            ToolCall(id="toolu_2", name="Read", arguments="{}"),
        ),
        finish_reason="tool_calls",
    ),
    "tools_of_other_forms": Reply(
        tool_calls=(
            ToolCall(id="toolu_1", name="mcp__lab__add", arguments='{"a": 1}'),
            ToolCall(id="toolu_2", name="apply_patch", arguments='{"input": "*** Begin Patch\\n*** End Patch"}'),
            ToolCall(id="toolu_3", name="apply_patch", arguments='{"patch": ""}'),
        ),
        finish_reason="tool_calls",
    ),
    "cut_by_length": Reply(text="Once upon", finish_reason="length"),
    "ended_by_stop_string": Reply(text="Once upon", stop_sequence=" a time"),
    "empty": Reply(),
}


def head_of(protocol: WireProtocol) -> ReplyHead:
    """The head of an answer, in the form that the protocol asks for."""
    return replace(HEAD, form=FORMS.get(protocol.name))


def render_streams(protocol: WireProtocol) -> dict[str, bytes]:
    """Name -> the whole stream, with one keep-alive before the turn."""
    head = head_of(protocol)
    opening = protocol.opening_event(head) + protocol.keep_alive_event(head)
    streams = {name: opening + b"".join(protocol.turn_events(head, reply, USAGE)) for name, reply in REPLIES.items()}
    error = WireError(ErrorKind.OVERLOADED, "the model is overloaded, try again later")
    return {**streams, "engine_error": opening + protocol.error_event(head, error)}


def golden_path(protocol: WireProtocol, name: str) -> Path:
    """Where the bytes of one stream are kept."""
    return FOLDER / f"{protocol.name}.{name}.sse"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for wire in PROTOCOLS:
        for name, stream in render_streams(wire).items():
            golden_path(wire, name).write_bytes(stream)
