"""Serve an app on a unix socket for as long as a block runs.

uvicorn's HTTP protocol without uvicorn's process: no signal handlers, no ticking loop, so that one event loop carries a
server per rollout and each starts and stops at once.

What a connection may cost is bounded, for the sake of the other rollouts: a harness gone mad must not fill the memory
that they share, or the loop. It hurts its own rollout only, whose time is bounded too.
"""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from clawhpc.errors import ProxyError, boundary

KEEP_ALIVE_S = 3600
"""A connection may idle while a tool runs: closing it would race with the harness's next request."""
MAX_CONNECTIONS = 64
"""Of one harness. The next one takes the place of the one that has been silent longest and waits for no answer."""
MAX_HEAD_BYTES = 64 * 2**10
"""Of request line and headers; harnesses send 2 kB."""
MAX_REQUEST_BYTES = 128 * 2**20
"""Head and body, twice what is read: of one that is too large, so much is received while its sender is told so."""
MAX_PIPELINED = 8
"""Requests on one connection that wait for the answer to an earlier one; no harness has any."""


class State(ServerState):
    """What the connections of one server share."""

    has_ended = False
    """Connections that come now, which the loop had accepted before, are cut off."""


class Connection(HttpToolsProtocol):
    """One connection of a harness. Whoever goes beyond its bounds is cut off, without a word."""

    in_head = False
    """It is between the first byte of a request and its body."""
    num_bytes = 0
    """Of the request so far."""
    heard_at = 0.0
    """By the loop's clock."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Also: an answer counts as written when the kernel has all of it, and there is room for another connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self.heard_at = self.loop.time()
        if isinstance(self.server_state, State) and self.server_state.has_ended:
            transport.abort()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """Also: bounded."""
        super().data_received(data)
        self.num_bytes += len(data)
        self.heard_at = self.loop.time()
        most = MAX_HEAD_BYTES if self.in_head else MAX_REQUEST_BYTES
        if self.num_bytes > most or len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Also: counts from here."""
        super().on_message_begin()
        self.in_head, self.num_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also: what comes behind the body is not kept."""
        if self.in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Also: counts as body from here."""
        self.in_head = False
        super().on_headers_complete()

    @property
    def waits(self) -> bool:
        """Some request of it has arrived and was not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        """Cut off the longest silent one of those that do not wait: this one, where all others do."""
        siblings = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(siblings) > MAX_CONNECTIONS:
            idle = [one for one in siblings if not one.waits]
            min(idle, key=lambda one: one.heard_at).transport.abort()


@asynccontextmanager
async def serve(app: ASGIApp, socket: Path, *, shutdown_s: float) -> AsyncIterator[None]:
    """`app` answers on `socket`, which only this user may open, until the block ends.

    Requests that are then still being answered have `shutdown_s` to end. Raises `ProxyError` when the socket cannot be
    made; its path must be shorter than 108 bytes.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    state = State()
    with listening(socket) as listener, anyio.CancelScope() as scope:
        scope.shield = True  # asyncio would lose a server whose start is cancelled
        server = await asyncio.get_running_loop().create_unix_server(
            partial(Connection, config=config, server_state=state, app_state={}), sock=listener
        )
        scope.shield = False
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                asyncio.get_running_loop().remove_reader(listener)
                await anyio.lowlevel.checkpoint()  # a server that is closed loses what the loop has just accepted
                server.close()
                await _hang_up(state, shutdown_s)


@contextmanager
def listening(path: Path) -> Iterator[sockets.socket]:
    """A unix socket at `path` that only this user may open; gone after the block. Raises `ProxyError`."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as listener:
        with boundary(ProxyError, f"cannot listen on {path}"):
            listener.bind(str(path))
            path.chmod(0o600)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


async def _hang_up(state: State, shutdown_s: float) -> None:
    """Cut every connection, once the answers on their way are written or `shutdown_s` has passed."""
    state.has_ended = True
    await _answered(state, shutdown_s)
    for connection in tuple(state.connections):
        connection.transport.abort()
    await _answered(state, shutdown_s)
    for task in tuple(state.tasks):  # it waits for a thread, whose work nobody wants any more
        task.cancel()
    await _answered(state, shutdown_s)


async def _answered(state: ServerState, timeout_s: float) -> None:
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=timeout_s)
