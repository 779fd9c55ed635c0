"""What each wire protocol offers the proxy, and the little that all of them share.

A protocol reads a request body into a `Conversation`, and writes a `Reply` as a JSON body or as server-sent events. The
events come in three parts, because the proxy streams only in form: the opening and the keep-alives while the engine
draws, then the whole turn.

What cannot be answered is a `WireError`; the protocol words it the way the real provider does, so that a harness reacts
as it does in the world.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from clawhpc.errors import ClawError
from clawhpc.records import Conversation, Message, Reply, Usage
from clawhpc.wire.fields import READS_TEXT, FieldTable

LINE_BREAKS_OF_SOME_CLIENTS = {
    "\u0085".encode(): b"\\u0085",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}
"""Clients that read lines with `str.splitlines` (httpx does) would cut an event in two at these."""

T = TypeVar("T")
Block_T = TypeVar("Block_T")
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


class FieldRefused(WireError):
    """A request that asks for something by name that there is not."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(ErrorKind.INVALID, f"{path} is not supported: {why}")
        self.path = path
        """Such as `tools[].type`."""


class FieldUnlisted(WireError):
    """A request with a field that the protocol's table does not list, where that is not allowed (`strict`)."""

    def __init__(self, path: str) -> None:
        super().__init__(ErrorKind.INVALID, f"{path}: unknown field")
        self.path = path


@dataclass(frozen=True, kw_only=True)
class WireRequest:
    """One parsed request."""

    conversation: Conversation
    fingerprint: bytes
    """Equal for a request, its retry, and its plain fallback."""
    form: Any = None
    """What the protocol must know of the request again to write its answer; nobody else looks into it."""
    overridden: tuple[str, ...] = ()
    """See `CallRecord`."""
    unlisted: tuple[str, ...] = ()
    """See `CallRecord`."""


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
    form: Any = None
    """See `WireRequest`."""


class WireProtocol(Protocol):
    """One way in which harnesses speak to models. Implementations have no state."""

    name: str
    """As `CallRecord.protocol` has it."""
    fields: FieldTable
    """Every request field that it knows."""

    def parse_request(self, body: bytes) -> WireRequest:
        """Read a request body. Raises `WireError`, naming the place, for what cannot be answered."""
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

    def error_event(self, head: ReplyHead, error: WireError) -> bytes:
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
    return BLOCK_SEPARATOR.join([text for text in texts if text and not text.isspace()])


def parse_arguments(arguments: str) -> Any:
    """The value of a tool call's JSON text. Raises `ValueError` where it is not JSON."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"tool call arguments are not JSON: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Reading request bodies
# ---------------------------------------------------------------------------------------------------------------------

MAX_DEPTH = 100
"""Of values in values, in schemas and arguments: ten times what is in use, and safe for all that walks through them."""

TokenLimit = Annotated[int, msgspec.Meta(ge=1)]
"""How many tokens a reply may have, as a harness asks for it."""

_CONTENT_TYPE = re.compile(r"Invalid value ('[^']*') - at `(\$.*(?:content|output)\[\d+\])\.type`")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T], root: str = "$") -> T:
    """`body` as the decoder's type. Fields that the type does not have are left out. `root` is what errors call it."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error) if " - at `" in str(error) else f"{error} - at `$`"
        message = message.replace("`$", f"`{root}")
        raise invalid(_CONTENT_TYPE.sub(_name_content, message)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the request body is not valid JSON: {error}") from error


def is_nested_deeper(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Does decoded JSON have lists or objects more than `levels` deep? Level by level, without recursion."""
    level = [value]
    for _ in range(levels + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return True


def split_at_results(
    blocks: Iterable[Block_T], result_of: Callable[[Block_T], Message | None], text_of: Callable[[Block_T], str]
) -> Iterator[Message]:
    """A user's message of several blocks: the results in it are messages of their own, and the text between them stays
    between them. `result_of` is None for a block of text.
    """
    texts: list[str] = []
    is_silent = True
    for block in blocks:
        result = result_of(block)
        if result is None:
            texts.append(text_of(block))
            continue
        if text := join_blocks(texts):
            yield Message(role="user", text=text)
        texts, is_silent = [], False
        yield result
    text = join_blocks(texts)
    if text or is_silent:
        yield Message(role="user", text=text)


def invalid(message: str) -> WireError:
    """The body is malformed, or asks for what there is not."""
    return WireError(ErrorKind.INVALID, message)


def _name_content(match: re.Match[str]) -> str:
    return f"content of type {match[1]} is not supported: {READS_TEXT} - at `{match[2]}`"
