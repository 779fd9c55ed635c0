"""The conversation, as every wire protocol is reduced to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MessageRole = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "tool_calls", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call of an assistant message."""

    id: str
    """As the harness knows it; the proxy gives it. No part of a message's identity (harnesses rewrite ids)."""
    name: str
    arguments: str
    """JSON text. Compared in canonical form: parsed, keys sorted, 1.0 equal to 1."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation, protocol-neutral. Anthropic's tool_result blocks become `tool` messages."""

    role: MessageRole
    text: str = ""
    thinking: str = ""
    """Reasoning of an assistant message, where the harness sends it back."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a `tool` message: the call that it answers."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that the harness offers to the model."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema, as the harness sent it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a harness asked for. In training the campaign's own values win."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One model request, protocol-neutral (wire -> proxy)."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False


@dataclass(frozen=True, kw_only=True)
class Usage:
    """True token counts of one call: what the engine received and drew."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the input tokens, those that the engine took from its prefix cache; 0 where it does not say."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The decoded view of one completion (proxy -> wire). What the harness makes of it never becomes training data."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    stop_sequence: str = ""
    """The stop string that ended it, where one did; no part of `text`."""
    malformed_calls: int = 0
    """Tool calls that could not be read, and stand in `text` as they were drawn."""
