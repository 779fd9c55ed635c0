"""A line between sandbox and proxy that counts requests and drops connections where a scenario says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from clawhpc.records import ExecResult
from clawhpc.sandbox.base import Sandbox, SandboxCommand

DRAIN_S = 0.2
"""For the proxy to write the rest of an answer that is cut: to the proxy it was delivered."""
CLOSE_S = 2.0
CHUNK_BYTES = 65536
LINE_END = b"\r\n"
HEAD_END = b"\r\n\r\n"


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
    cut_off: anyio.Event = field(kw_only=True)
    """Set when a connection that was cut has ended, and the proxy has noticed."""

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
            if connection.cut is not None:
                self.cut_off.set()

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
            with suppress(asyncio.IncompleteReadError):
                while not self.is_lost:
                    await self.pass_request(from_client)
            if self.is_lost:
                self.to_client.transport.abort()
            self.to_proxy.write_eof()

    async def pass_request(self, from_client: asyncio.StreamReader) -> None:
        """One whole request. Raises IncompleteReadError where there is none any more."""
        head = await from_client.readuntil(HEAD_END)
        if is_model_request(head):
            self.cut = self.line.note_request(head)
        await self.pass_on(head)
        if b"\r\ntransfer-encoding: chunked\r\n" in head.lower():
            while size := int(line := await from_client.readuntil(LINE_END), base=16):
                await self.pass_on(line + await from_client.readexactly(size + len(LINE_END)))
            await self.pass_on(line + await from_client.readuntil(LINE_END))
        else:
            await self.pass_on(await from_client.readexactly(content_length(head)))

    async def pass_on(self, piece: bytes) -> None:
        self.to_proxy.write(piece)
        await self.to_proxy.drain()

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


def is_model_request(head: bytes) -> bool:
    """Whether it asks for a reply."""
    line = head.partition(LINE_END)[0]
    return line.startswith(b"POST ") and b"count" not in line.lower()


def content_length(head: bytes) -> int:
    for line in head.lower().split(LINE_END):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


@dataclass
class FaultySandbox:
    """A real sandbox whose harness reaches its proxy over a `Line`; keeps what the harness left in its workspace."""

    inner: Sandbox
    cuts: tuple[Cut, ...]
    log_name: str
    cut_off: anyio.Event
    """See `Line`."""
    line: Line | None = None
    """Of the harness; None before it ran."""
    log: str = ""
    """The log file that the harness's commands wrote."""
    files: tuple[str, ...] = ()
    """All others, by path in the workspace."""
    name: str = field(init=False, default="faulty")

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        if command.proxy_socket is None:
            return await self.inner.run(command, timeout_s=timeout_s)
        workspace = next(mount.source for mount in command.mounts if mount.writable)
        log = workspace / self.log_name
        self.line = Line(command.proxy_socket, {cut.request: cut for cut in self.cuts}, cut_off=self.cut_off)
        try:
            async with listening(self.line, command.proxy_socket.with_name("line")) as socket:
                return await self.inner.run(replace(command, proxy_socket=socket), timeout_s=timeout_s)
        finally:
            self.log = log.read_text() if log.exists() else ""
            self.files = tuple(sorted(str(path.relative_to(workspace)) for path in workspace.rglob("*") if path != log))

    @property
    def python(self) -> str:
        return self.inner.python

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
