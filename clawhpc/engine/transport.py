"""HTTP/1.1 over one unix socket: what httpx2 needs of it to talk to an engine, at a tenth of the CPU time.

Requests and answers are whole; there are no redirects, proxies or certificates. Each request has a connection of its
own while it lasts; a cancelled one takes its connection with it, so that the engine aborts it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httptools
import httpx2

MAX_IDLE = 64
"""Connections that wait for their next request."""


class UnixTransport(httpx2.AsyncBaseTransport):
    """Sends requests to the server that listens on `socket`. One per event loop."""

    def __init__(self, socket: Path, *, idle_s: float) -> None:
        """A connection that has idled for longer than `idle_s` is not used again."""
        self._socket, self._idle_s = socket, idle_s
        self._idle: list[_Connection] = []
        self._closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The whole answer. Raises `httpx2.TransportError` where there is none."""
        content = await request.aread()
        connection = self._take_idle() or await self._connect()
        try:
            return await connection.ask(_head(request) + content)
        finally:
            if connection.reusable and not self._closed and len(self._idle) < MAX_IDLE:  # its answer is whole
                self._idle.append(connection)
            else:
                connection.abort()

    async def aclose(self) -> None:
        """Close what idles, and each other connection once its answer is there."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()

    def _take_idle(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and now - connection.answered_at <= self._idle_s:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_unix_connection(_Connection, str(self._socket))
        except OSError as error:
            raise httpx2.ConnectError(f"{self._socket}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One request after another. The methods from `on_header` on are called by the parser."""

    reusable = False
    answered_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream of bytes"
        self._transport = transport
        self._answer: asyncio.Future[httpx2.Response] | None = None

    async def ask(self, request: bytes) -> httpx2.Response:
        """The answer to a request."""
        self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def abort(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self._transport.abort()  # nobody has asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection was closed: {error or 'by the server'}")

    def _fail(self, why: str) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(httpx2.RemoteProtocolError(why))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        assert self._answer is not None, "an answer is read after a request"
        if self._answer.done():
            raise ValueError("two answers to one request")
        self.reusable = self._parser.should_keep_alive()
        self.answered_at = asyncio.get_running_loop().time()
        status, content = self._parser.get_status_code(), b"".join(self._body)
        self._answer.set_result(httpx2.Response(status, headers=self._headers, content=content))


def _head(request: httpx2.Request) -> bytes:
    lines = [b"%b: %b\r\n" % header for header in request.headers.raw]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), request.url.raw_path, b"".join(lines))
