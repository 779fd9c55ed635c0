"""Read tasks in the ClawGym folder format.

    <folder>/<any name>/data_entry.json         task_id, user_query; optional input_mount_dir, mcp_servers, metadata
    <folder>/<any name>/input_files/            optional; copied to input_mount_dir: the workspace, or a folder in it
    <folder>/<any name>/reward/reward.sh        and its helpers, seen by the verifier as <workspace>/reward
    <folder>/<any name>/mcp/                    optional; programs of mcp_servers, seen by the harness as /mcp
    <folder>/<any name>/mcp_host/               optional; programs of those on the host, seen by no sandbox

Its scripts name `/root/.openclaw/workspace` outright, so the workspace stands there in every sandbox, whatever
`input_mount_dir` says.

`mcp_servers`, which is ours, lists programs that speak the Model Context Protocol over stdin and stdout:

    "mcp_servers": [{"name": "lab", "command": ["python3", "/mcp/server.py"], "env": {"ROUNDS": "3"}}]

The harness starts them in its sandbox, with the workspace as current directory. `mcp/` is read-only there, no part of
the workspace and not seen by the verifier. Of other programs they find what the sandbox has, such as /usr/bin/python3.

    "mcp_servers": [{"name": "web", "command": ["python3", "./search.py"], "host": true}]

A server with `host` runs outside the sandbox, on the worker's host and with the rights of whoever runs the worker, so
that it may use the network, or know what the harness must not see. A word that begins with ./ is a file of `mcp_host/`.
Its current directory is an empty one, its environment `env` and a plain PATH. Each connection of the harness has a
process of its own. Such a task is refused unless tasks.mcp.allow_host is set.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from clawhpc.records import WORKSPACE_MOUNT, McpServer, ScriptCheck, TaskSpec, Verifier
from clawhpc.tasks.faults import (
    MAX_NESTING,
    Fault,
    Gathering,
    LoadedTasks,
    check_path,
    check_text,
    nesting,
    read_bytes,
    real,
    task_folders,
)
from clawhpc.tasks.mcp import check_servers

ENTRY = "data_entry.json"
MCP_FOLDER, MCP_HOST_FOLDER = "mcp", "mcp_host"
REWARD_FOLDER = "reward"
"""Below the workspace, and only in the verifier's sandbox."""


class _McpEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One of mcp_servers. A key that is not listed is an error: nobody else reads these."""

    name: str
    command: list[str]
    env: dict[str, str] = {}
    host: bool = False


class _Entry(msgspec.Struct):
    """data_entry.json. Keys that are not listed are ignored."""

    task_id: str
    user_query: str
    input_mount_dir: str | None = None
    mcp_servers: list[_McpEntry] = []
    metadata: dict[str, Any] = {}
    rubric: Any = None
    """A fault: nobody would be asked about it, and its author counts on that."""


def load_tasks(folder: Path) -> LoadedTasks:
    """Every sound task in `folder`, and a fault for every other folder in it."""
    found = Gathering("ClawGym")
    for root in task_folders(folder):
        with found.one():
            found.add(_load_task(root), root.name, f"{root}/{ENTRY}: task_id")
    return found.loaded()


def _load_task(root: Path) -> TaskSpec:
    check_path(root)
    path = root / ENTRY
    entry = _read_entry(path)
    if not (root / REWARD_FOLDER / "reward.sh").is_file():
        raise Fault(f"{root}/{REWARD_FOLDER}/reward.sh: missing")
    inputs, programs, hosted = root / "input_files", root / MCP_FOLDER, root / MCP_HOST_FOLDER
    servers = [_server(root, f"{path}: mcp_servers[{index}]", one) for index, one in enumerate(entry.mcp_servers)]
    return TaskSpec(
        task_id=entry.task_id,
        instruction=entry.user_query,
        input_dir=str(real(inputs)) if inputs.is_dir() else None,
        input_subdir=_input_subdir(path, entry.input_mount_dir, inputs),
        verifier=Verifier(script=ScriptCheck(folder=str(real(root / REWARD_FOLDER)))),
        mcp_servers=check_servers(f"{path}: mcp_servers", servers),
        mcp_dir=str(real(programs)) if programs.is_dir() else None,
        mcp_host_dir=str(real(hosted)) if hosted.is_dir() else None,
        metadata=entry.metadata,
    )


def _read_entry(path: Path) -> _Entry:
    too_deep = f"{path}: nested more than {MAX_NESTING} levels deep"
    try:
        entry = msgspec.json.decode(read_bytes(path), type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Fault(f"{path}: {error}") from error
    except RecursionError as error:
        raise Fault(too_deep) from error
    if nesting(entry.metadata) > MAX_NESTING:
        raise Fault(too_deep)
    if entry.rubric is not None:
        raise Fault(
            f"{path}: rubric: a task in this format is scored by its reward.sh alone; PinchBench's format has rubrics, "
            "beside a script or without, and JobBench's"
        )
    check_text(f"{path}: task_id", entry.task_id)
    check_text(f"{path}: user_query", entry.user_query)
    check_text(f"{path}: input_mount_dir", entry.input_mount_dir or "", required=False)
    return entry


def _server(root: Path, key: str, entry: _McpEntry) -> McpServer:
    argv = tuple(_host_word(root, key, word) for word in entry.command) if entry.host else tuple(entry.command)
    return McpServer(name=entry.name, argv=argv, env=entry.env, on_host=entry.host)


def _host_word(root: Path, key: str, word: str) -> str:
    """A word of a command on the host; one that names a program of the task, as its path."""
    if not word.startswith("./"):
        return word
    path = root / MCP_HOST_FOLDER / word
    if "\0" in word or ".." in path.parts or not path.exists():
        raise Fault(f"{key}.command: {word!r} is no file of {MCP_HOST_FOLDER}/")
    return str(path.resolve())


def _input_subdir(path: Path, mount: str | None, inputs: Path) -> str:
    """Where below the workspace the input files go."""
    target = PurePosixPath(mount or WORKSPACE_MOUNT)
    if not target.is_relative_to(WORKSPACE_MOUNT) or ".." in target.parts:
        raise Fault(f"{path}: input_mount_dir {mount!r} is neither {WORKSPACE_MOUNT} nor a folder in it")
    if mount is not None and not inputs.is_dir():
        raise Fault(f"{path}: input_mount_dir is set, but there is no folder input_files")
    subdir = target.relative_to(WORKSPACE_MOUNT)
    first_names = subdir.parts[:1] or tuple(entry.name for entry in inputs.glob(REWARD_FOLDER))
    if REWARD_FOLDER in first_names:
        raise Fault(f"{path}: input_files would lie at {WORKSPACE_MOUNT}/{REWARD_FOLDER}, the verifier's own place")
    return str(subdir)
