"""The identity of messages across the rewriting that harnesses do.

Between a reply and its echo, harnesses strip text, drop blank blocks, rewrite tool call ids, parse and re-serialise
arguments (sorted keys, other escapes, 1.0 as 1), and drop or trim reasoning. Two messages are the same when their
canonical forms are: role, stripped text, and the tool calls in order, by name and parsed arguments. What only marks a
message (ids, cache_control, reasoning) has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import msgspec

from clawhpc.records import Message, Reply
from clawhpc.wire.base import parse_arguments

DIGEST_BYTES = 16
MAX_EXACT_INT = 2**53
"""JavaScript harnesses read larger integers as the nearest double."""

_encode_sorted = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, kw_only=True)
class History:
    """The canonical identity of a list of messages, or of the end of one."""

    messages: tuple[bytes, ...]
    """The digest of each message."""
    chain: tuple[bytes, ...]
    """`chain[i]` is the digest of all messages before index i; one longer than `messages`."""


def digest_after(before: bytes, digests: Iterable[bytes]) -> History:
    """The identity of the messages that have these digests, after those whose chain digest is `before`.

    Equal histories have equal chains.
    """
    messages = tuple(digests)
    return History(messages=messages, chain=tuple(accumulate(messages, extend_chain, initial=before)))


def extend_chain(before: bytes, message: bytes) -> bytes:
    """The chain digest after one more message."""
    return blake2b(before + message, digest_size=DIGEST_BYTES).digest()


def digest_message(message: Message) -> bytes:
    """Equal for messages that are the same but for what harnesses rewrite."""
    calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
    return _digest((message.role, message.text.strip(), calls))


def digest_reply(reply: Reply) -> bytes:
    """The digest of the assistant message that repeats `reply`."""
    return digest_message(Message(role="assistant", text=reply.text, tool_calls=reply.tool_calls))


def canonical_arguments(arguments: str) -> str:
    """JSON text with sorted keys, no spaces, and numbers as JavaScript reads them; other text only stripped."""
    try:
        return _encode_sorted(_canonical_value(parse_arguments(arguments))).decode()
    except (ValueError, OverflowError, RecursionError):
        return arguments.strip()


def _canonical_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical_value(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _canonical_number(value)
    return value


def _canonical_number(value: int | float) -> int | float:
    if abs(value) > MAX_EXACT_INT:
        return float(value)
    return int(value) if value == int(value) else value


def _digest(value: Any) -> bytes:
    text = msgspec.json.encode(value)
    return blake2b(text, digest_size=DIGEST_BYTES).digest()
