"""A harness as far as a proxy sees it: an HTTP connection, and a conversation that grows by a turn with every call."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools

from benchmarks.proxy.policy import ARGUMENTS, SAID, TOOL

MAX_ANSWER_S = 120.0
"""Hundreds of long requests at once may wait for each other; beyond this, an answer is not coming."""
IDLE_S = 2.0
"""Less than any server waits."""
FIRST_CHARACTER, STRIDE, NUM_STARTS = 20_000, 50_021, 4_000_037
"""Where in the text a conversation begins: at another place for each of its numbers."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where a session's chat completions are answered."""

    path: str
    socket: Path | None = None
    port: int = 0
    """On the loopback interface, where there is no socket."""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one request; times are seconds after its first byte was written."""

    first_s: float
    """The first byte of the body."""
    last_s: float
    body: bytes


class Connection(asyncio.Protocol):
    """Asks one request after the other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._head = "".join(
            f"{name}: {value}\r\n"
            for name, value in {"host": "engine", "content-type": "application/json", **endpoint.headers}.items()
        )
        self._done: asyncio.Future[None] | None = None
        self._used_at = time.monotonic()
        self._transport: Any = None

    async def connect(self) -> None:
        """Be ready for a request, with a new connection unless the old one was used lately: servers hang up on idle ones."""
        if self._transport is not None and time.monotonic() - self._used_at < IDLE_S:
            return
        self.close()
        loop = asyncio.get_running_loop()
        if self._endpoint.socket is not None:
            await loop.create_unix_connection(lambda: self, str(self._endpoint.socket))
        else:
            await loop.create_connection(lambda: self, "127.0.0.1", self._endpoint.port)

    async def ask(self, body: bytes) -> Answer:
        """The answer; RuntimeError where it is none."""
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._first = bytearray(), 0.0
        self._done = asyncio.get_running_loop().create_future()
        head = f"POST {self._endpoint.path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        start = time.perf_counter()
        self._transport.write(head.encode() + body)
        async with asyncio.timeout(MAX_ANSWER_S):
            await self._done
        last = time.perf_counter()
        self._used_at = time.monotonic()
        if self._parser.get_status_code() != 200:
            raise RuntimeError(f"status {self._parser.get_status_code()}: {bytes(self._body)[:500]!r}")
        return Answer(first_s=self._first - start, last_s=last - start, body=bytes(self._body))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        self._used_at = time.monotonic()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError("the connection was closed before the answer had come"))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """See `httptools`."""
        if not self._body:
            self._first = time.perf_counter()
        self._body += data

    def on_message_complete(self) -> None:
        """See `httptools`."""
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Conversation:
    """The history of one session, as the body of a chat completion."""

    def __init__(self, text: str, *, number: int, num_bytes: int) -> None:
        """`text`: from which its content is taken. The system prompt and the tools are everybody's, the task is not."""
        tools, system = shared_head(text, num_bytes)
        self._head = b'"model":"policy","max_tokens":1000,"tools":' + tools + b',"messages":[' + system
        self._messages = bytearray()
        self._text = text
        self._position = FIRST_CHARACTER + STRIDE * number % NUM_STARTS
        missing = num_bytes - len(self.body(stream=False)) - 60
        self._add({"role": "user", "content": f"Task {number}. {self._next_text(max(missing, 100))}"})

    def body(self, *, stream: bool) -> bytes:
        """The next request."""
        form = b'{"stream":true,' if stream else b'{"stream":false,'
        return b"".join((form, self._head, self._messages, b"]}"))

    def add_turn(self, answer: Answer, result_bytes: int, *, stream: bool) -> None:
        """The reply as it came, and what its tool calls gave."""
        message = read_reply(answer.body, stream=stream)
        self._add(message)
        for call in message["tool_calls"]:
            self._add({"role": "tool", "tool_call_id": call["id"], "content": self._next_text(result_bytes)})

    def _add(self, message: Any) -> None:
        self._messages += b"," + json.dumps(message, ensure_ascii=False).encode()

    def _next_text(self, num_bytes: int) -> str:
        """A piece of the text that takes about so many bytes as JSON."""
        size = int(num_bytes / 1.08)
        piece = self._text[self._position : self._position + size]
        self._position += size
        return piece


def shared_head(text: str, num_bytes: int) -> tuple[bytes, bytes]:
    """Tools and system message: a quarter of the body, at most what real harnesses send."""
    share = min(num_bytes // 4, 40_000)
    fields = {f"field{at}": {"type": "string", "description": text[at * 90 : at * 90 + 80]} for at in range(6)}
    schema = {"type": "object", "properties": fields, "required": ["field0"]}
    bash = {"type": "object", "properties": {name: {"type": "string"} for name in ARGUMENTS}}
    tools = [{"type": "function", "function": {"name": TOOL, "description": "Run a command.", "parameters": bash}}]
    while len(json.dumps(tools)) < share * 2 // 3 and num_bytes > 10_000:
        function = {"name": f"tool{len(tools)}", "description": text[2000:2300], "parameters": schema}
        tools.append({"type": "function", "function": function})
    system = {"role": "system", "content": f"You are a careful agent. {text[5000 : 5000 + share // 3]}"}
    return json.dumps(tools, separators=(",", ":")).encode(), json.dumps(system, ensure_ascii=False).encode()


def read_reply(body: bytes, *, stream: bool) -> dict[str, Any]:
    """The assistant's message. RuntimeError where it is not what the engine said."""
    message = _join(_deltas(body)) if stream else json.loads(body)["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    said = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    if (message.get("content") or "").strip() != SAID or said != [(TOOL, ARGUMENTS)]:
        raise RuntimeError(f"not what the engine said: {body[:2000]!r}")
    return {"role": "assistant", "content": message["content"], "tool_calls": calls}


def _deltas(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            for choice in json.loads(line[6:]).get("choices", ()):
                yield choice["delta"]


def _join(deltas: Iterator[dict[str, Any]]) -> dict[str, Any]:
    content = ""
    calls: dict[int, Any] = {}
    for delta in deltas:
        content += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            new = {"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
            call = calls.setdefault(part["index"], new)
            for name in ("name", "arguments"):
                call["function"][name] += part["function"].get(name) or ""
    return {"content": content, "tool_calls": list(calls.values())}
