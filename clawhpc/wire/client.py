"""The other direction of a protocol: asking an endpoint. What the protocols share of it.

A `Conversation` becomes a request body, and the body of an answer a `Reply`, both whole: nothing is streamed. What is
made here is read by our own side of the protocol as the same conversation, but for what providers refuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from clawhpc.records import Conversation, FinishReason, Message, Reply, ToolCall, Usage
from clawhpc.wire.base import ContextOverflow, Json, invalid, is_nested_deeper, join_blocks, parse_arguments
from clawhpc.wire.body import mend_surrogates

OVERFLOWS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"maximum context length is (?P<maximum>\d+) tokens\D+(?P<num_tokens>\d+)",  # OpenAI, vLLM
        r"prompt is too long: (?P<num_tokens>\d+) tokens > (?P<maximum>\d+)",  # Anthropic
        r"exceed context limit: (?P<num_tokens>\d+) \+ \d+ > (?P<maximum>\d+)",  # Anthropic, with `max_tokens`
    )
)
"""How providers word that a prompt does not fit, where they give figures."""
OVERFLOW_WORDS = re.compile(
    r"context_length_exceeded|maximum context length|prompt is too long|context[ _](window|limit|size)", re.IGNORECASE
)
"""The same, where they do not."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """How a reply is asked for, beside the conversation."""

    model: str
    """As the endpoint calls it."""
    max_tokens: int
    temperature: float
    seed: int
    """For protocols that have one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back."""

    reply: Reply
    usage: Usage
    """As the endpoint counts."""
    model: str
    """As the endpoint says which it was; empty where it does not."""


class ClientProtocol(Protocol):
    """One way to ask an endpoint. Implementations have no state."""

    path: str
    """Below the endpoint's base URL."""

    def headers(self, key: str | None) -> dict[str, str]:
        """Of a request, with the key where there is one."""
        ...

    def request_body(self, conversation: Conversation, ask: Ask) -> Json:
        """What is asked. Raises `WireError`, naming the place, for what the protocol cannot say."""
        ...

    def read_answer(self, body: bytes, new_id: Callable[[], str]) -> Answer:
        """What an answer of status 200 says; `new_id` names its tool calls, in order. ValueError for no such answer."""
        ...


# ---------------------------------------------------------------------------------------------------------------------
# Conversation -> request
# ---------------------------------------------------------------------------------------------------------------------


def with_own_ids(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with each tool call named by its place, and each result by the call that it answers.

    Providers differ in what an id may look like, and harnesses rewrite them; nine letters and digits please everybody.
    Raises `WireError` for a result that answers no call.
    """
    named, num_calls = [], 0
    waiting: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        if message.tool_calls:
            ids = [f"call{num_calls + at:05d}" for at in range(len(message.tool_calls))]
            num_calls += len(ids)
            calls = tuple(replace(call, id=one) for call, one in zip(message.tool_calls, ids, strict=True))
            waiting = [*((call.id, one) for call, one in zip(message.tool_calls, ids, strict=True)), *waiting]
            message = replace(message, tool_calls=calls)
        elif message.role == "tool":
            answered = next((pair for pair in waiting if pair[0] == message.tool_call_id), None)
            if answered is None:
                raise invalid(f"messages[{index}] is the result of no tool call that the endpoint could know")
            waiting.remove(answered)
            message = replace(message, tool_call_id=answered[1])
        named.append(message)
    return tuple(named)


def read_arguments(call: ToolCall) -> Json:
    """The arguments of a call in the history. Raises `WireError` where they are no JSON object."""
    try:
        arguments = parse_arguments(call.arguments or "{}")
    except ValueError as error:
        raise invalid(f"a call of {call.name!r}: {error}") from error
    if not isinstance(arguments, dict):
        raise invalid(f"a call of {call.name!r}: its arguments are not an object")
    return arguments


# ---------------------------------------------------------------------------------------------------------------------
# Answer -> Reply
# ---------------------------------------------------------------------------------------------------------------------


def decode_answer(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """`body` as the decoder's type; ValueError, with the place, where it is none."""
    try:
        return decoder.decode(mend_surrogates(body))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not an answer of this protocol: {error}: {_on_one_line(body)}") from error


def make_reply(
    *,
    texts: Sequence[str],
    thinking: str,
    calls: Sequence[tuple[str, str]],
    new_id: Callable[[], str],
    cut: bool,
    stop_sequence: str = "",
) -> Reply:
    """A reply of text blocks and calls, (name, arguments as JSON text).

    As with the policy, a call that no harness could run becomes the text that it is, and a reply with one that can be
    run finishes for `tool_calls`, even where it was `cut` after it.
    """
    readable = [call for call in calls if _is_object(call[1])]
    malformed = [f"{name} {arguments}" for name, arguments in calls if not _is_object(arguments)]
    finish: FinishReason = "tool_calls" if readable else "length" if cut else "stop"
    return Reply(
        text=join_blocks([*texts, *malformed]),
        thinking=thinking,
        tool_calls=tuple(ToolCall(id=new_id(), name=name, arguments=arguments) for name, arguments in readable),
        finish_reason=finish,
        stop_sequence=stop_sequence,
        malformed_calls=len(malformed),
    )


def _is_object(arguments: str) -> bool:
    try:
        value = parse_arguments(arguments)
    except ValueError:
        return False
    return isinstance(value, dict) and not is_nested_deeper(value)


# ---------------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------------


def error_message(body: bytes) -> str:
    """What an error says, on one line, whole, in whichever form providers and servers have for it."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _on_one_line(body)
    inner = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(inner, dict) and isinstance(inner.get("message"), str):
        code = inner.get("code") or inner.get("type")
        said = f"{code}: {inner['message']}" if isinstance(code, str) else inner["message"]
        return " ".join(said.split())
    return _on_one_line(body)


def overflow_of(message: str, window: int) -> ContextOverflow | None:
    """The overflow that a provider's error speaks of, if any. `window`: what is said where it gives no figures."""
    for pattern in OVERFLOWS:
        if match := pattern.search(message):
            num_tokens, maximum = int(match["num_tokens"]), int(match["maximum"])
            return ContextOverflow(max(num_tokens, maximum + 1), maximum)
    return ContextOverflow(window + 1, window) if OVERFLOW_WORDS.search(message) else None


def _on_one_line(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())
