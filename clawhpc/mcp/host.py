"""The MCP servers of one rollout that run on the host, each behind a unix socket in the rollout's folder.

Each connection has a server process of its own: a harness starts a server as often as it likes, and so here. What a
connection may cost is bounded, for the policy can make connections too. All of it ends with the rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, Process, TaskGroup

from clawhpc.errors import SandboxError, boundary, ungrouped
from clawhpc.harness.base import MCP_START_S
from clawhpc.mcp import bridge
from clawhpc.mcp.process import NotStarted, host_process
from clawhpc.mcp.traffic import Connection, Traffic
from clawhpc.records import MCP_MOUNT, RUN_MCP_MOUNT, McpServer, TaskSpec
from clawhpc.sandbox.base import Mount

INSIDE = "/run/clawhpc/mcp"
"""Where a sandbox shows the bridge and the sockets."""
BRIDGE_TARGET = f"{INSIDE}/bridge.py"
MAX_OPEN = 8
"""Connections to one server at a time: the main loop's, and those of subagents."""
MAX_STARTED = 64
"""Connections to one server in one rollout."""
MAX_BYTES = 64 * 2**20
"""On one connection in one direction, and of what its server prints on standard error."""
MAX_MESSAGES = 10_000
"""On one connection. Each is read here, in the loop that carries all rollouts of the worker."""
CHUNK_BYTES = 16384
"""Read at a time: as many messages as it may hold are read before another rollout has its turn."""
TAIL_BYTES = 2000
"""Of standard error, in an error."""
GRACE_S = 2.0
"""For a server to end by itself after its client has gone, and to be waited for after it has closed its output."""
OVER = "the rollout was over"
GONE = "its client has gone"

Fail = Callable[[SandboxError], None]


@dataclass(eq=False)
class HostServers:
    """Those of one rollout, while they can be reached."""

    sockets: dict[str, Path]
    """Name of a server -> its socket."""
    traffic: Traffic

    def seen_inside(self, servers: Sequence[McpServer], python: str) -> tuple[McpServer, ...]:
        """`servers` as the harness is to start them: the bridge, run by `python`, for each that is on the host."""
        return tuple(_bridged(server, python) if server.on_host else server for server in servers)

    def mounts(self, task: TaskSpec) -> tuple[Mount, ...]:
        """What the sandbox must show for that, and for the servers inside. A socket needs no right to write."""
        programs = ((task.mcp_dir, MCP_MOUNT), (task.run_mcp_dir, RUN_MCP_MOUNT))
        shown = [Mount(source=Path(source), target=target) for source, target in programs if source is not None]
        if self.sockets:
            shown.append(Mount(source=Path(bridge.__file__), target=BRIDGE_TARGET))
        sockets = (Mount(source=path, target=_socket_target(name)) for name, path in self.sockets.items())
        return (*shown, *sockets)


@asynccontextmanager
async def open_servers(
    servers: Sequence[McpServer],
    *,
    folder: Path,
    environment: Mapping[str, str],
    fail: Fail,
    now: Callable[[], float],
) -> AsyncIterator[HostServers]:
    """Those of `servers` that are on the host can be reached within the block; after it no process of them is left.

    `folder`: the rollout's, with a short path. `environment`: that every process of this worker carries. `fail` is told
    of a server that does not start.
    """
    hosted = [server for server in servers if server.on_host]
    open_ = HostServers({server.name: folder / f"m{place}" for place, server in enumerate(hosted)}, Traffic(now))
    with ungrouped():
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            for server in hosted:
                socket = open_.sockets[server.name]
                desk = _Desk(server, socket.with_suffix(".d"), environment, fail, open_.traffic)
                await stack.enter_async_context(_listening(socket, desk, tasks))
            yield open_
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _listening(socket: Path, desk: _Desk, tasks: TaskGroup) -> AsyncIterator[None]:
    """Connections to `socket` are answered by `desk`, in `tasks`. One that comes too late is cut off."""

    def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if tasks.cancel_scope.cancel_called:
            writer.transport.abort()
        else:
            tasks.start_soon(desk.answer, Client(reader, writer))

    with boundary(SandboxError, f"MCP server {desk.server.name}"):
        listener = await asyncio.start_unix_server(meet, socket, limit=CHUNK_BYTES)
    try:
        yield
    finally:
        listener.close()


def _bridged(server: McpServer, python: str) -> McpServer:
    return replace(server, argv=(python, "-I", "-S", BRIDGE_TARGET, _socket_target(server.name)), env={})


def _socket_target(name: str) -> str:
    return f"{INSIDE}/{name}.sock"


class Client:
    """One connection from the sandbox. asyncio's streams, for these can be cancelled at any time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=0)  # what is written is with the kernel

    async def receive(self) -> bytes:
        """What comes next; nothing when its other side is closed, in whatever way."""
        try:
            return await self._reader.read(CHUNK_BYTES)
        except ConnectionError:
            return b""

    async def send(self, chunk: bytes) -> bool:
        """Whether there is anybody to send it to."""
        try:
            self._writer.write(chunk)
            await self._writer.drain()
        except ConnectionError:
            return False
        return True

    def close(self) -> None:
        """Cut it off."""
        self._writer.transport.abort()


@dataclass(eq=False)
class _Desk:
    """Answers the connections to one server."""

    server: McpServer
    folder: Path
    """For the current directories of its processes."""
    environment: Mapping[str, str]
    fail: Fail
    traffic: Traffic
    num_open: int = 0
    num_started: int = 0

    async def answer(self, client: Client) -> None:
        """One connection, from its beginning to its end; one too many is closed at once."""
        with closing(client):
            if self.num_open >= MAX_OPEN or self.num_started >= MAX_STARTED:
                self.traffic.count(self.server.name, "connections refused")
                return
            connection = Connection(self.traffic, self.server.name, self.num_started)
            self.traffic.count(self.server.name, "connections")
            self.num_open += 1
            self.num_started += 1
            try:
                await self._carry(client, connection)
            finally:
                connection.end(OVER)
                self.num_open -= 1

    async def _carry(self, client: Client, connection: Connection) -> None:
        cwd = self.folder / str(connection.number)
        cwd.mkdir(parents=True)
        try:
            async with host_process(self.server, cwd=cwd, environment=self.environment) as process:
                relay = _Relay(client, process, connection)
                await relay.run()
            why, failed = relay.told, relay.failed
        except NotStarted as error:
            why, failed = str(error), True
        connection.end(why)
        if failed:
            self.fail(SandboxError(f"MCP server {self.server.name} on the host: {why}"))


@dataclass(eq=False)
class _Relay:
    """Carries one connection until either side has ended, or more has come than may."""

    client: Client
    process: Process
    connection: Connection
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Of all that is carried."""
    why: str = GONE
    """What has ended it."""
    asked_all: bool = False
    """Its client has closed its side."""
    errors: bytes = b""
    """The end of what the server printed on standard error."""
    errors_read: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        """Returns when it is over."""
        with self.scope:
            async with anyio.create_task_group() as tasks:
                for task in (self._ask, self._read_errors, self._watch_start):
                    tasks.start_soon(task)
                await self._answer()
                with anyio.move_on_after(GRACE_S):
                    await self.process.wait()
                    await self.errors_read.wait()
                code = self.process.returncode
                ended = "the server closed its output" if code is None else f"the server ended with exit code {code}"
                self._end(GONE if self.asked_all and code == 0 else ended)

    @property
    def told(self) -> str:
        """What has ended it, for a person."""
        errors = self.errors.decode(errors="replace").strip()
        return f"{self.why}: {errors}" if errors else self.why

    @property
    def failed(self) -> bool:
        """The server was to be used, and did not come so far that it could be."""
        return not self.connection.answered and (self.connection.asked or not self.asked_all)

    def _end(self, why: str) -> None:
        """It is over; the first reason counts."""
        if not self.scope.cancel_called:
            self.why = why
        self.scope.cancel()

    async def _ask(self) -> None:
        """From the sandbox to the server. One that has nobody to ask it any more may end in peace."""
        stdin, num_bytes = self.process.stdin, 0
        assert stdin is not None, "it was started with pipes"
        while chunk := await self.client.receive():
            num_bytes += len(chunk)
            self.connection.hear_sandbox(chunk)
            self._check(num_bytes)
            try:
                await stdin.send(chunk)
            except (anyio.BrokenResourceError, ConnectionError):
                return  # the server has ended, or will be asked nothing more
        self.asked_all = True
        self.scope.deadline = anyio.current_time() + GRACE_S
        await stdin.aclose()

    async def _answer(self) -> None:
        """From the server to the sandbox."""
        num_bytes = 0
        while chunk := await _receive(self.process.stdout):
            num_bytes += len(chunk)
            self.connection.hear_server(chunk)
            self._check(num_bytes)
            if not await self.client.send(chunk):
                self.asked_all = True
                self._end(GONE)

    async def _read_errors(self) -> None:
        num_bytes = 0
        while chunk := await _receive(self.process.stderr):
            num_bytes += len(chunk)
            self.errors = (self.errors + chunk)[-TAIL_BYTES:]
            self._check(num_bytes)
        self.errors_read.set()

    async def _watch_start(self) -> None:
        await anyio.sleep(MCP_START_S)
        if self.connection.asked and not self.connection.answered:
            self._end(f"the server answered nothing within {MCP_START_S} s")

    def _check(self, num_bytes: int) -> None:
        """End what takes too much of the worker."""
        if num_bytes > MAX_BYTES:
            self._end(f"more than {MAX_BYTES >> 20} MB on one connection")
        if self.connection.num_messages > MAX_MESSAGES:
            self._end(f"more than {MAX_MESSAGES} messages on one connection")


async def _receive(stream: ByteReceiveStream | None) -> bytes:
    """What comes next from a program; nothing at the end."""
    assert stream is not None, "it was started with pipes"
    try:
        return await stream.receive(CHUNK_BYTES)
    except anyio.EndOfStream:
        return b""
