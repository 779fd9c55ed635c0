"""hermes-agent 0.19.0, headless: a Python program, OpenAI Chat Completions.

It keeps its memory, skills and sessions below HOME, and puts nothing into the workspace. Volatile text: its prompt
holds the kernel's version and the date. It first asks the model's server for models in the way of other servers, and
does without. Where a prompt does not fit and it may not compact, or a call fails for good, it says so in place of an
answer, and ends with exit code 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from clawhpc.harness.base import (
    API_KEY,
    INSTALL_MOUNT,
    PYTHON_START,
    HarnessSettings,
    WireName,
    check_binaries,
    install_folder,
    plain_text,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

ENTRY = "run_hermes:main"
CONFIG_FILE = ".hermes/config.yaml"
ENV = {"LANG": "C.UTF-8", "HERMES_YOLO_MODE": "1"}
LEAST_WINDOW = 64_000
"""Tokens. It refuses to start with less, and so is told this; the proxy tells it when the true window is full."""
MCP_START_S = 60
"""How long it waits for the servers of a task before its first call; by itself 1.5 s."""
SUBAGENT_MARK = "You are a focused subagent working on a specific delegated task."
"""In the system prompt of a subagent; its calls have no header that says so."""


@dataclass(frozen=True, kw_only=True)
class HermesSettings(HarnessSettings):
    """What a campaign may choose."""

    compact: bool = False
    """Let it summarise a history that outgrows half of the window that it was told, or that the proxy calls full."""
    max_retries: int = 2
    """Of one failed call, after waits of 3 s, 5 s."""
    bash_timeout_s: int = 30
    """Of one command, where the call names no other."""


@dataclass(frozen=True)
class Hermes:
    """The adapter."""

    settings: HermesSettings
    install_root: Path

    name: ClassVar[str] = "hermes"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "0.19.0"
    settings_type: ClassVar[type[HarnessSettings]] = HermesSettings
    mounts_mcp: ClassVar[bool] = True

    @property
    def install_dir(self) -> Path:
        """See `Harness`."""
        return install_folder(self.install_root, self.name, self.version)

    def check_install(self) -> None:
        """See `Harness`."""
        check_binaries(self.name, self.install_dir, PYTHON_START)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        return LaunchPlan(
            argv=(f"{INSTALL_MOUNT}/{PYTHON_START}", ENTRY, "--oneshot", plain_text(request.instruction, "-")),
            env=ENV,
            files={CONFIG_FILE: json.dumps(self._config(request))},
            read_only={str(self.install_dir): INSTALL_MOUNT},
        )

    def _config(self, request: LaunchRequest) -> dict[str, Any]:
        """Off is what it would do unasked: review a long run for lessons, title it, fetch programs, hide tools."""
        return {
            "model": {
                "provider": "custom",
                "base_url": f"{request.base_url}/v1",
                "api_key": API_KEY,
                "default": request.model,
                "context_length": max(request.context_window, LEAST_WINDOW),
                "max_tokens": request.max_output_tokens,
            },
            "agent": {"api_max_retries": 1 + self.settings.max_retries},
            "terminal": {"timeout": self.settings.bash_timeout_s},
            "compression": {"enabled": self.settings.compact},
            "memory": {"nudge_interval": 0},
            "skills": {"creation_nudge_interval": 0},
            "auxiliary": {"title_generation": {"enabled": False}},
            "tools": {"tool_search": {"enabled": "off"}},
            "lsp": {"enabled": False},
            "model_catalog": {"enabled": False},
            "security": {"allow_lazy_installs": False, "tirith_enabled": False},
            "mcp_discovery_timeout": MCP_START_S,
            "mcp_servers": {
                server.name: {"command": server.argv[0], "args": server.argv[1:], "env": server.env}
                for server in request.mcp_servers
            },
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. The call without tools is the one that summarises."""
        del headers
        if any(SUBAGENT_MARK in message.text for message in conversation.messages if message.role == "system"):
            return CallRole.SUBAGENT, {}
        return (CallRole.MAIN if conversation.tools else CallRole.COMPACTION), {}
