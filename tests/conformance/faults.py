"""A line between sandbox and proxy that counts requests and drops connections where a scenario says so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from clawhpc.records import ExecResult
from clawhpc.sandbox.base import Sandbox, SandboxCommand

DRAIN_S = 0.2
"""For the proxy to write the rest of an answer that is cut: to the proxy it was delivered."""
LOST_S = 0.1
"""After the last piece of a request whose answer is to be lost: it is whole, and its answer still to be drawn."""
CLOSE_S = 2.0
CHUNK_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Of the answer to one model request nothing comes through from some place on, and its connection is closed."""

    request: int
    """Position among the model requests of the run, from 0."""
    after: bytes = b""
    """The last bytes that come through; empty for none at all."""


@dataclass
class Line:
    """Carries connections to the proxy's socket."""

    proxy: Path
    cuts: dict[int, Cut]
    num_requests: int = 0
    """Model requests so far, resent ones included."""
    first_bytes: int = 0
    """Of the body of the first one."""

    async def carry(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection, from end to end."""
        from_proxy, to_proxy = await asyncio.open_unix_connection(str(self.proxy))
        connection = Connection(line=self, to_client=to_client, to_proxy=to_proxy)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connection.ask, from_client)
                await connection.answer(from_proxy)
                tasks.cancel_scope.cancel()
        finally:
            to_client.transport.abort()
            to_proxy.transport.abort()

    def note_request(self, head: bytes) -> Cut | None:
        """A model request begins; how its answer is to be cut."""
        self.num_requests += 1
        if self.num_requests == 1:
            self.first_bytes = content_length(head)
        return self.cuts.get(self.num_requests - 1)


@dataclass(kw_only=True)
class Connection:
    """One connection of the harness, and its continuation to the proxy."""

    line: Line
    to_client: asyncio.StreamWriter
    to_proxy: asyncio.StreamWriter
    cut: Cut | None = None

    @property
    def is_lost(self) -> bool:
        """Nothing of the answer that is awaited now is to come through."""
        return self.cut is not None and not self.cut.after

    async def ask(self, from_client: asyncio.StreamReader) -> None:
        """Until the harness has no more to ask, or its whole request is there and the answer is to be lost."""
        with suppress(OSError):
            while True:
                chunk = b""
                with anyio.move_on_after(LOST_S if self.is_lost else math.inf):
                    chunk = await from_client.read(CHUNK_BYTES)
                if not chunk:
                    break
                if is_model_request(chunk):
                    self.cut = self.line.note_request(chunk)
                self.to_proxy.write(chunk)
                await self.to_proxy.drain()
            if self.is_lost:
                self.to_client.transport.abort()
            self.to_proxy.write_eof()

    async def answer(self, from_proxy: asyncio.StreamReader) -> None:
        """Until the proxy has no more to say, or the cut."""
        with suppress(OSError):
            while chunk := await from_proxy.read(CHUNK_BYTES):
                if self.is_lost:
                    continue
                if self.cut is not None and self.cut.after in chunk:
                    await self.break_off(chunk, self.cut.after, from_proxy)
                    return
                self.to_client.write(chunk)
                await self.to_client.drain()

    async def break_off(self, chunk: bytes, last: bytes, from_proxy: asyncio.StreamReader) -> None:
        """Nothing more for the harness; a proxy that has begun to answer does not notice."""
        self.to_client.write(chunk[: chunk.index(last) + len(last)])
        self.to_client.close()
        with anyio.move_on_after(DRAIN_S):
            while await from_proxy.read(CHUNK_BYTES):
                pass


def is_model_request(chunk: bytes) -> bool:
    """Whether a request begins here that asks for a reply: a request's head stands at the start of a chunk."""
    line = chunk[:400].partition(b"\r\n")[0]
    return line.startswith(b"POST ") and b"count" not in line.lower()


def content_length(head: bytes) -> int:
    for line in head.partition(b"\r\n\r\n")[0].lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


@dataclass
class FaultySandbox:
    """A real sandbox whose harness reaches its proxy over a `Line`; keeps what the harness left in its log."""

    inner: Sandbox
    cuts: tuple[Cut, ...]
    log_name: str
    line: Line | None = None
    """Of the harness; None before it ran."""
    log: str = ""
    """The log file that the harness's commands wrote."""
    name: str = field(init=False, default="faulty")

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        if command.proxy_socket is None:
            return await self.inner.run(command, timeout_s=timeout_s)
        log = next(mount.source for mount in command.mounts if mount.writable) / self.log_name
        self.line = Line(command.proxy_socket, {cut.request: cut for cut in self.cuts})
        try:
            async with listening(self.line, command.proxy_socket.with_name("line")) as socket:
                return await self.inner.run(replace(command, proxy_socket=socket), timeout_s=timeout_s)
        finally:
            self.log = log.read_text() if log.exists() else ""

    def check_hidden(self, path: Path) -> None:
        self.inner.check_hidden(path)


@asynccontextmanager
async def listening(line: Line, socket: Path) -> AsyncIterator[Path]:
    """`line` carries what comes to `socket` until the block ends. Its connections end with those of the sandbox."""
    server = await asyncio.start_unix_server(line.carry, str(socket))
    try:
        yield socket
    finally:
        server.close()
        with anyio.move_on_after(CLOSE_S, shield=True):
            await server.wait_closed()
