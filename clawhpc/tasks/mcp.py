"""The MCP servers that a task declares: checked once, for every format that has them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from clawhpc.records import McpServer
from clawhpc.tasks.faults import Fault

SERVER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""Becomes part of the names of its tools, for which providers allow these characters, and 64 of them in all."""
EXPANDED = re.compile(r"\$[A-Za-z_{]|\{(?:env|file):")
"""What some harness puts something else for: a variable, or a file. Others leave it as it is."""


def check_servers(key: str, servers: Sequence[McpServer]) -> tuple[McpServer, ...]:
    """`servers`, or the first fault in them; `key`: the file, and the list in it, that declare them."""
    names = [server.name for server in servers]
    for index, server in enumerate(servers):
        here = f"{key}[{index}]"
        check_server(here, server)
        if server.name in names[:index]:
            raise Fault(f"{here}.name {server.name!r} is that of another already")
    return tuple(servers)


def check_server(here: str, server: McpServer) -> None:
    """The first fault in one; `here`: the key that declares it. Of one on the host a harness sees the name alone."""
    if not SERVER_NAME.fullmatch(server.name):
        raise Fault(f"{here}.name {server.name!r}: must be letters, digits, _ and -, 32 at most")
    if not server.argv or not server.argv[0]:
        raise Fault(f"{here}.command is empty")
    if any("\0" in text for text in (*server.argv, *server.env, *server.env.values())):
        raise Fault(f"{here} has a NUL")
    expanded = next(filter(None, map(EXPANDED.search, (*server.argv, *server.env.values()))), None)
    if expanded and not server.on_host:
        raise Fault(f"{here} has {expanded[0]!r}: harnesses would expand it; put it into a file of the server's own")
    if any(not name or "=" in name for name in server.env):
        raise Fault(f"{here}.env: the name of a variable is empty or has a =")
