"""The streams whose bytes are kept as golden files. `python -m tests.contract.wire_streams` writes them anew."""

from __future__ import annotations

from pathlib import Path

from clawhpc.records import Reply, ToolCall, Usage
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ErrorKind, ReplyHead, WireError, WireProtocol
from clawhpc.wire.gemini import Gemini
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_chat_request import ChatForm

FOLDER = Path(__file__).with_name("wire")
PROTOCOLS: tuple[WireProtocol, ...] = (Anthropic(), OpenAIChat(), Gemini())
HEAD = ReplyHead(
    id="00000007",
    model="policy",
    created=1_790_000_000,
    input_tokens=41,
    form=ChatForm(usage_in_stream=True),
)
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
    "cut_by_length": Reply(text="Once upon", finish_reason="length"),
    "empty": Reply(),
}


def render_streams(protocol: WireProtocol) -> dict[str, bytes]:
    """Name -> the whole stream, with one keep-alive before the turn."""
    opening = protocol.opening_event(HEAD) + protocol.keep_alive_event(HEAD)
    streams = {name: opening + b"".join(protocol.turn_events(HEAD, reply, USAGE)) for name, reply in REPLIES.items()}
    error = WireError(ErrorKind.OVERLOADED, "the model is overloaded, try again later")
    return {**streams, "engine_error": opening + protocol.error_event(HEAD, error)}


def golden_path(protocol: WireProtocol, name: str) -> Path:
    """Where the bytes of one stream are kept."""
    return FOLDER / f"{protocol.name}.{name}.sse"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for wire in PROTOCOLS:
        for name, stream in render_streams(wire).items():
            golden_path(wire, name).write_bytes(stream)
