"""MCP servers that a run adds to each of its tasks, whether its tasks may start programs on the hosts, and that the
folders which harnesses see hold nothing that is to be kept from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def check_shown(tasks: Sequence[TaskSpec], kept: Mapping[str, str | None]) -> None:
    """UserError where a folder that a harness is shown holds one that it must not see, or lies in one (law 7).

    Not to be seen are those of the verifiers and of the servers on the host, whichever task has them, and those of
    `kept`: key -> a folder with such things in it, in which what is shown may lie.
    """
    shown: dict[str, str] = {}
    for task in tasks:
        image = task.image.folder if task.image is not None else None
        folders = {"inputs": task.input_dir, "MCP programs": task.mcp_dir, "image": image}
        shown |= {
            folder: f"the {name} of task {task.task_id}" for name, folder in folders.items() if folder is not None
        }
        if task.run_mcp_dir is not None:
            shown[task.run_mcp_dir] = f"{KEY}.folder={task.run_mcp_dir}"
    hidden = {Path(folder).resolve(): task.task_id for task in tasks for folder in task.hidden_folders}
    named = {folder: f"the verifier's, or a server's, of task {task_id}" for folder, task_id in hidden.items()}
    named |= {Path(folder).resolve(): key for key, folder in kept.items() if folder is not None}
    holding = {above: folder for folder in named for above in (folder, *folder.parents)}
    for folder, name in shown.items():
        place = Path(folder).resolve()
        seen = holding.get(place) or next((above for above in place.parents if above in hidden), None)
        if seen is not None:
            raise UserError(
                f"{name}: a harness would see {seen} ({named[seen]}); choose a folder with nothing else in it"
            )


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
