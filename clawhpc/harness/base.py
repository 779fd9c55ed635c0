"""What an adapter says about its harness, and nothing of what the harness does.

A harness is a program that we pin, start headless in a sandbox with one instruction, and point at our proxy. Its
adapter turns that into a `LaunchPlan`, and reads from a call what the harness made it for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from clawhpc.errors import UserError
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest, TaskSpec

WireName = Literal["anthropic", "openai_chat", "openai_responses", "gemini"]

PACKAGED_CONTAINERS = Path(__file__).parents[1] / "containers"
CONTAINERS_DIR = PACKAGED_CONTAINERS if PACKAGED_CONTAINERS.is_dir() else Path(__file__).parents[2] / "containers"
"""In an installed package inside it, in a checkout beside it."""

INSTALL_MOUNT = "/harness"
"""Where a sandbox shows the install folder, read-only: at the top, where images have no folder of their own."""
PYTHON_START = "start_python.py"
"""Starts a harness that pip installed: its arguments are MODULE:FUNCTION and those of the harness."""
API_KEY = "sk-clawhpc"
"""Harnesses insist on a key; the proxy knows a rollout by the path of its URL."""


@dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """What a campaign may choose of a harness; each adapter has its own."""


class Harness(Protocol):
    """One harness, pinned. Implementations have no state but their settings and their place on disk."""

    name: ClassVar[str]
    """In `GroupKey.harness` and in the configuration."""
    protocol: ClassVar[WireName]
    """What it speaks to the model."""
    version: ClassVar[str]
    """The one that is installed and that the adapter was written for."""
    settings_type: ClassVar[type[HarnessSettings]]
    mounts_mcp: ClassVar[bool]
    """Whether it starts the MCP servers that a task declares, and offers their tools from the first call."""

    def __init__(self, settings: Any, install_root: Path) -> None:
        """`settings`: of `settings_type`. `install_root`: see `install_folder`."""
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
        """What a call was made for, and the headers that say so. Header names are lower-case."""
        ...


def check_mcp(harness: type[Harness], tasks: Iterable[TaskSpec]) -> None:
    """Raise `UserError` where a task declares MCP servers and `harness` cannot mount them: it would be another task."""
    for task in tasks:
        if task.mcp_servers and not harness.mounts_mcp:
            names = ", ".join(server.name for server in task.mcp_servers)
            raise UserError(f"harness {harness.name} has no MCP, but task {task.task_id} declares servers: {names}")


def install_folder(install_root: Path, name: str, version: str) -> Path:
    """Where `containers/install_harness.sh NAME CACHE_DIR` puts a harness; `install_root` is CACHE_DIR/harness."""
    return install_root / f"{name}-{version}"


def plain_text(instruction: str, *marks: str) -> str:
    """`instruction`; with a space before it if a harness would take what begins with one of `marks` for no text."""
    return f" {instruction}" if instruction.startswith(marks) else instruction


def check_binaries(name: str, folder: Path, *binaries: str) -> None:
    """Raise `UserError` unless all of `binaries` lie in `folder`, the install of harness `name`, and can be run."""
    for binary in binaries:
        if not os.access(folder / binary, os.X_OK):
            remedy = f"{CONTAINERS_DIR / 'install_harness.sh'} {name} {folder.parent.parent}"
            raise UserError(f"harness {name}: no program {folder / binary}; run: {remedy}")
