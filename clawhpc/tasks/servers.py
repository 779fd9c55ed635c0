"""MCP servers that a run adds to each of its tasks, and whether its tasks may start programs on the hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from clawhpc.errors import UserError
from clawhpc.records import McpServer, TaskSpec
from clawhpc.tasks.faults import Fault
from clawhpc.tasks.mcp import check_server

KEY = "tasks.mcp"
"""Of these settings."""


@dataclass(frozen=True, kw_only=True)
class RunServer:
    """A server of the Model Context Protocol, as a task declares one."""

    command: tuple[str, ...]
    """Words, the program first."""
    env: dict[str, str] = field(default_factory=dict)
    host: bool = False
    """It runs on the worker's host, outside the sandbox."""


@dataclass(frozen=True, kw_only=True)
class McpSettings:
    """Servers besides those that the tasks declare themselves."""

    allow_host: bool = False
    """Tasks may declare servers that run on the workers' hosts, with the rights of whoever runs these: look at the
    programs first. A server of these settings needs no leave."""
    servers: dict[str, RunServer] = field(default_factory=dict)
    """Name -> a server that every task has."""
    folder: str | None = None
    """With the programs of those in the sandbox, which shows it read-only as /mcp_run."""


def equip(tasks: Iterable[TaskSpec], settings: McpSettings) -> tuple[TaskSpec, ...]:
    """`tasks` with the servers of the run. UserError names the key where they cannot be had."""
    if settings.folder is not None and not Path(settings.folder).is_dir():
        raise UserError(f"{KEY}.folder={settings.folder}: no such folder")
    added = tuple(_server(name, entry) for name, entry in settings.servers.items())
    return tuple(_equipped(task, added, settings) for task in tasks)


def _server(name: str, entry: RunServer) -> McpServer:
    key = f"{KEY}.servers.{name}"
    server = McpServer(name=name, argv=entry.command, env=entry.env, on_host=entry.host)
    try:
        check_server(key, server)
    except Fault as fault:
        raise UserError(str(fault)) from fault
    if entry.host and any(word.startswith(("./", "../")) for word in entry.command):
        raise UserError(f"{key}.command: a path of the host must be absolute: the server has a folder of its own")
    return server


def _equipped(task: TaskSpec, added: tuple[McpServer, ...], settings: McpSettings) -> TaskSpec:
    if not settings.allow_host:
        for server in task.mcp_servers:
            if server.on_host:
                _refuse(task, server)
    for server in added:
        if server.name in {one.name for one in task.mcp_servers}:
            raise UserError(f"{KEY}.servers.{server.name}: task {task.task_id} has a server of that name already")
    return replace(task, mcp_servers=(*task.mcp_servers, *added), run_mcp_dir=settings.folder) if added else task


def _refuse(task: TaskSpec, server: McpServer) -> NoReturn:
    raise UserError(
        f"task {task.task_id} would start its MCP server {server.name} on the workers' hosts, outside any sandbox: "
        f"{' '.join(server.argv)}; look at its programs, and then set {KEY}.allow_host=true"
    )
