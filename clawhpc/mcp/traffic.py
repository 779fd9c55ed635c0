"""What crosses the sockets of a rollout's MCP servers, read from the bytes as they pass. Pure, but for a clock.

Messages are JSON-RPC, one a line (modelcontextprotocol.io, transport "stdio"). Uses of a server are kept, with their
answers; everything else is counted by its method. Whoever writes here may be the policy: all that is kept is bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from clawhpc.records import McpCall

KEPT_METHODS = frozenset({"tools/call", "resources/read", "prompts/get"})
MAX_CALLS = 500
"""That are kept of a rollout; a harness makes one or two per reply. The others are counted."""
MAX_TEXT = 20_000
"""Characters of one text."""
MAX_TEXTS = 2_000_000
"""Characters of all texts of a rollout; those after them are left out."""
MAX_NAME = 200
MAX_LINE_BYTES = 4 * 2**20
"""Of one message that is read; a longer one passes, and is counted as unreadable."""
MAX_BATCH_BYTES = 2**16
"""Of a line with several messages, which cost far more than one of its length; a longer one is unreadable too."""
MAX_METHODS = 50
"""That are counted by name, of all servers."""
METHOD = re.compile(r"[A-Za-z_/]{1,60}")
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading JSON raises."""


class _Message(msgspec.Struct):
    """A request, a notification or an answer. What is not needed is never decoded."""

    id: msgspec.Raw = msgspec.Raw()
    method: str = ""
    params: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


class _Use(msgspec.Struct):
    """Parameters of one of KEPT_METHODS."""

    name: str = ""
    uri: str = ""
    arguments: msgspec.Raw = msgspec.Raw()


@dataclass(kw_only=True)
class OpenCall:
    """A use of a server whose answer is awaited, or has come."""

    server: str
    connection: int
    method: str
    name: str
    arguments: str
    started_at: float
    ended_at: float | None = None
    result: str = ""
    error: str = ""

    def record(self) -> McpCall:
        """As it stands."""
        return McpCall(
            server=self.server,
            connection=self.connection,
            method=self.method,
            name=self.name,
            arguments=self.arguments,
            result=self.result,
            error=self.error,
            started_at=self.started_at,
            duration_s=(self.ended_at or self.started_at) - self.started_at,
        )


class Traffic:
    """All connections of one rollout."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: seconds since the epoch."""
        self.now = now
        self.counts: Counter[str] = Counter()
        """Server and method, or what else happened -> how often."""
        self._calls: list[OpenCall] = []
        self._num_chars = 0

    def calls(self) -> tuple[McpCall, ...]:
        """In the order in which they were made."""
        return tuple(call.record() for call in self._calls)

    def count(self, server: str, what: str) -> None:
        """One more of them; beyond MAX_METHODS kinds, of `other messages`."""
        key = f"{server} {what}"
        self.counts[key if key in self.counts or len(self.counts) < MAX_METHODS else f"{server} other messages"] += 1

    def keep(self, call: OpenCall) -> bool:
        """Whether there is room for it."""
        kept = len(self._calls) < MAX_CALLS
        if kept:
            self._calls.append(call)
        return kept

    def text(self, raw: bytes) -> str:
        """JSON as it came, shortened where it is long, left out where too much has come."""
        text = shortened(raw.decode(errors="replace"), min(MAX_TEXT, max(0, MAX_TEXTS - self._num_chars)))
        self._num_chars += len(text)
        return text


@dataclass(eq=False)
class Connection:
    """What passes on one connection to one server."""

    traffic: Traffic
    server: str
    number: int
    """From 0, of this server's."""
    num_messages: int = 0
    """In both directions, empty lines among them."""
    asked: bool = False
    """The server was asked something. By which method a harness begins, `initialize` or another, is its own affair."""
    answered: bool = False
    """The server has answered something, with no error: it can be used."""
    _requests: Lines = field(default_factory=lambda: Lines())
    _answers: Lines = field(default_factory=lambda: Lines())
    _open: dict[bytes, OpenCall] = field(default_factory=dict)
    """By the id of its request, as it was written."""

    def hear_sandbox(self, chunk: bytes) -> None:
        """What is on its way to the server."""
        for message in self._read(self._requests, chunk):
            self.asked |= bool(message.method and message.id)
            if message.method in KEPT_METHODS and message.id:
                self._open_call(message)
            elif message.method:
                self._count(message.method)

    def hear_server(self, chunk: bytes) -> None:
        """What is on its way to the sandbox."""
        for message in self._read(self._answers, chunk):
            if message.method:
                self._count(message.method)
                continue
            self.answered |= bool(message.result)
            if (call := self._open.pop(bytes(message.id), None)) is not None:
                self._close_call(call, message)

    def end(self, why: str) -> None:
        """There will be no more answers."""
        for call in self._open.values():
            call.ended_at, call.error = self.traffic.now(), why
        self._open.clear()

    def _read(self, lines: Lines, chunk: bytes) -> Iterator[_Message]:
        for line in lines.feed(chunk):
            try:
                messages = _messages(line)
            except UNREADABLE:
                self.traffic.count(self.server, "unreadable messages")
                messages = []
            self.num_messages += max(1, len(messages))
            yield from messages

    def _count(self, method: str) -> None:
        self.traffic.count(self.server, method if METHOD.fullmatch(method) else "other messages")

    def _open_call(self, message: _Message) -> None:
        use = _Use()
        try:
            use = msgspec.json.decode(message.params, type=_Use) if message.params else use
            arguments = bytes(use.arguments)
        except UNREADABLE:
            arguments = bytes(message.params)  # no use of a server, but what was asked
        call = OpenCall(
            server=self.server,
            connection=self.number,
            method=message.method,
            name=shortened(use.name or use.uri, MAX_NAME),
            arguments=self.traffic.text(arguments),
            started_at=self.traffic.now(),
        )
        if self.traffic.keep(call):
            self._open[bytes(message.id)] = call
        else:
            self._count(message.method)

    def _close_call(self, call: OpenCall, message: _Message) -> None:
        call.ended_at = self.traffic.now()
        call.result, call.error = self.traffic.text(bytes(message.result)), self.traffic.text(bytes(message.error))


def _messages(line: bytes | None) -> list[_Message]:
    """One message, or several in an array, as an older version of the protocol allows. Raises one of UNREADABLE."""
    if line is None:
        raise msgspec.DecodeError(f"more than {MAX_LINE_BYTES} bytes")
    if not line.lstrip().startswith(b"["):
        return [msgspec.json.decode(line, type=_Message)] if line.strip() else []
    if len(line) > MAX_BATCH_BYTES:
        raise msgspec.DecodeError(f"several messages in more than {MAX_BATCH_BYTES} bytes")
    return msgspec.json.decode(line, type=list[_Message])


class Lines:
    """Puts lines together. One of more than MAX_LINE_BYTES is None."""

    def __init__(self) -> None:
        self._open = bytearray()
        self._too_long = False

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """The lines that `chunk` ends."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._extend(end)
            line = None if self._too_long else bytes(self._open)
            self._open.clear()
            self._too_long = False
            yield line
        self._extend(rest)

    def _extend(self, piece: bytes) -> None:
        self._too_long |= len(self._open) + len(piece) > MAX_LINE_BYTES
        if self._too_long:
            self._open.clear()
        else:
            self._open += piece


def shortened(text: str, most: int) -> str:
    """`text` of at most `most` characters, and a note of those that are left out of its middle."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[len(text) - half :]}"
