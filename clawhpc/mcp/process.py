"""A program that runs on the host for one connection, and is gone with all that it started when that is over."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.abc import Process

from clawhpc.errors import SandboxError
from clawhpc.ledger import kill_marked
from clawhpc.records import McpServer

MARKER_VARIABLE = "CLAWHPC_MCP"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Unless the server's own `env` says otherwise: what it finds does not depend on who started the worker."""
KILL_S = 8.0
"""For its processes to be gone once they are killed; milliseconds, unless a disk hangs."""
QUIET_S = 0.2
"""For whatever a start that was cut off may have left to come out of an exec."""
END_S = 10.0
"""For all of that, and for the program to be waited for. Cancellation cannot interrupt it."""


class NotStarted(Exception):
    """The program cannot be executed, and why."""


@asynccontextmanager
async def host_process(server: McpServer, *, cwd: Path, environment: Mapping[str, str]) -> AsyncIterator[Process]:
    """The server's program while it lives; afterwards no process of it is left. Raises NotStarted, SandboxError.

    `cwd`: an empty folder, its HOME as well. `environment`: of the ledger, by which the program is known should this
    process die. Of our own environment it gets nothing.
    """
    marker = f"clawhpc-mcp-{secrets.token_hex(8)}"
    defaults = {"PATH": PATH, "HOME": str(cwd), "LANG": "C.UTF-8"}
    carried = {**defaults, **server.env, **environment, MARKER_VARIABLE: marker}
    process = None
    survivors: list[int] = []
    try:
        try:
            process = await anyio.open_process(server.argv, cwd=cwd, env=carried, start_new_session=True)
        except OSError as error:
            raise NotStarted(f"cannot start {server.argv[0]}: {error.strerror}") from error
        yield process
    finally:
        with anyio.move_on_after(END_S, shield=True):
            survivors = await to_thread.run_sync(partial(_kill, marker, process))
            if process is not None:
                await process.aclose()
    if survivors:
        raise SandboxError(f"MCP server {server.name}: processes {survivors} cannot be killed")


def _kill(marker: str, process: Process | None) -> list[int]:
    """End all that carries `marker`; those that would not go."""
    if process is None:
        return kill_marked(marker, deadline_s=KILL_S, quiet_s=QUIET_S)
    return kill_marked(marker, session=process.pid, deadline_s=KILL_S)
