"""Serve an app on a unix socket for as long as a block runs.

uvicorn's HTTP protocol without uvicorn's process: no signal handlers, no ticking loop, so that one event loop carries a
server per rollout and each starts and stops at once.
"""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from clawhpc.errors import ProxyError, boundary

KEEP_ALIVE_S = 3600
"""A connection may idle while a tool runs: closing it would race with the harness's next request."""


@asynccontextmanager
async def serve(app: ASGIApp, socket: Path, *, shutdown_s: float) -> AsyncIterator[None]:
    """`app` answers on `socket`, which only this user may open, until the block ends.

    Requests that are then still being answered have `shutdown_s` to end. Raises `ProxyError` when the socket cannot be
    made; its path must be shorter than 108 bytes.
    """
    config = uvicorn.Config(
        app,
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    state = ServerState()
    protocol_class: Any = config.http_protocol_class
    with listening(socket) as listener, anyio.CancelScope() as scope:
        scope.shield = True  # asyncio would lose a server whose start is cancelled
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: protocol_class(config=config, server_state=state, app_state={}), sock=listener
        )
        scope.shield = False
        try:
            yield
        finally:
            server.close()
            with anyio.CancelScope(shield=True):
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


async def _hang_up(state: ServerState, shutdown_s: float) -> None:
    """Cut every connection, once the answers on their way are written or `shutdown_s` has passed."""
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
