"""What each wire protocol offers the proxy, and the little that all of them share.

A protocol reads a request body into a `Conversation`, and writes a `Reply` as a JSON body or as server-sent events. The
events come in three parts, because the proxy streams only in form: the opening and the keep-alives while the engine
draws, then the whole turn.

What cannot be answered is a `WireError`; the protocol words it the way the real provider does, so that a harness reacts
as it does in the world.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import msgspec

from clawhpc.errors import ClawError
from clawhpc.records import Conversation, Reply, Usage

LINE_BREAKS_OF_SOME_CLIENTS = {
    "\u0085".encode(): b"\\u0085",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}
"""Clients that read lines with `str.splitlines` (httpx does) would cut an event in two at these."""

T = TypeVar("T")
Json = dict[str, Any]

BLOCK_SEPARATOR = "\n"
"""Between the text blocks of one message. Providers do not say what they put there; a line break never glues words."""


class ErrorKind(StrEnum):
    """Why a request gets no reply; a protocol turns it into a status and its own words."""

    INVALID = "invalid"
    """The body is malformed, or holds content that a text model cannot take."""
    NOT_FOUND = "not_found"
    """No such path, or the session has ended."""
    TOO_LARGE = "too_large"
    """The body is over the limit in bytes."""
    CONTEXT = "context"
    """The prompt does not fit the context window: harnesses compact when they see it."""
    LIMIT = "limit"
    """The rollout has used up what it may: not to be tried again."""
    OVERLOADED = "overloaded"
    """The engine failed: worth trying again, for all that the harness can know."""


class WireError(ClawError):
    """A request that gets no reply, and why. The message is for the harness, and so may be read by the policy."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ContextOverflow(WireError):
    """A prompt that does not fit the context window; each protocol words it in its own way."""

    def __init__(self, num_tokens: int, maximum: int) -> None:
        super().__init__(ErrorKind.CONTEXT, f"prompt of {num_tokens} tokens, but the window holds {maximum}")
        self.num_tokens = num_tokens
        self.maximum = maximum


@dataclass(frozen=True, kw_only=True)
class WireRequest:
    """One parsed request."""

    conversation: Conversation
    usage_in_stream: bool = False
    """OpenAI's `stream_options.include_usage`: the stream ends with a chunk that carries the usage."""


@dataclass(frozen=True, kw_only=True)
class ReplyHead:
    """What is known of an answer before it is drawn."""

    id: str
    """Unique in its session, and the same when an answer is replayed; each protocol adds its own prefix."""
    model: str
    """As the harness asked for it."""
    created: int
    """Seconds since the epoch."""
    input_tokens: int
    usage_in_stream: bool = False
    """See `WireRequest`."""


class WireProtocol(Protocol):
    """One way in which harnesses speak to models. Implementations have no state."""

    name: str
    """As `CallRecord.protocol` has it."""

    def parse_request(self, body: object) -> WireRequest:
        """Read a decoded JSON body. Raises `WireError`, naming the field, for what cannot be answered."""
        ...

    def reply_body(self, head: ReplyHead, reply: Reply, usage: Usage) -> Json:
        """The whole reply as one JSON body."""
        ...

    def opening_event(self, head: ReplyHead) -> bytes:
        """Opens a stream before anything is drawn."""
        ...

    def keep_alive_event(self, head: ReplyHead) -> bytes:
        """A real event without content. Comments would not do: half of the harnesses time out over them."""
        ...

    def turn_events(self, head: ReplyHead, reply: Reply, usage: Usage) -> Iterator[bytes]:
        """The whole turn, and the end of the stream."""
        ...

    def error_body(self, error: WireError) -> tuple[int, Json]:
        """HTTP status and JSON body, in the provider's own words: harnesses look for them."""
        ...

    def error_event(self, error: WireError) -> bytes:
        """Ends a stream that was opened before the error was known."""
        ...


def server_sent_event(body: object, event: str | None = None) -> bytes:
    """One event in the format of the HTML standard's server-sent events, with `body` as JSON."""
    data = msgspec.json.encode(body)
    for character, escape in LINE_BREAKS_OF_SOME_CLIENTS.items():
        data = data.replace(character, escape)
    return b"data: %b\n\n" % data if event is None else b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def join_blocks(texts: Iterable[str]) -> str:
    """The text of one message; blank blocks, which harnesses drop at will, leave no trace."""
    return BLOCK_SEPARATOR.join(text for text in texts if text.strip())


def parse_arguments(arguments: str) -> Any:
    """The value of a tool call's JSON text. Raises `ValueError` where it is not JSON."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"tool call arguments are not JSON: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Reading foreign JSON: each function names the place where the type is wrong
# ---------------------------------------------------------------------------------------------------------------------

REQUIRED: Any = object()


def read_object(value: object, where: str) -> Mapping[str, Any]:
    """`value` as a JSON object."""
    return read(value, dict, where)


def read(value: object, kind: type[T] | tuple[type[T], ...], where: str) -> T:
    """`value`, which is of type `kind`; true and false are no numbers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise invalid(f"{where}: {type(value).__name__} is not allowed here")
    return value


def read_key(source: Mapping[str, Any], key: str, kind: type[T] | tuple[type[T], ...], where: str, default: T) -> T:
    """`source[key]`, or `default` where it is missing or null; without a default it is required."""
    value = source.get(key)
    if value is None:
        if default is REQUIRED:
            raise invalid(f"{where}{key}: field required")
        return default
    return read(value, kind, f"{where}{key}")


def invalid(message: str) -> WireError:
    """The body is wrong."""
    return WireError(ErrorKind.INVALID, message)


def unsupported(kind: object, where: str) -> WireError:
    """Well-formed content that a text model cannot take."""
    return invalid(f"{where}: content of type {kind!r} is not supported: this model reads text only")
