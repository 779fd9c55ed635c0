"""nanobot 0.3.5 (PyPI's nanobot-ai), headless: a Python program, OpenAI Chat Completions.

It runs through its Python interface (containers/harness/nanobot/run_nanobot.py), because its command would put a git
repository, a persona and a memory into the workspace. What is left of that, `.nanobot/workspace-id` and an empty folder
`memory`, is taken away at the end, and stays where a run is stopped. It tries a failed call again after 1 s, 2 s, 4 s.
It ends with its main loop: subagents that still work then are lost.
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
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

ENTRY = "run_nanobot:main"
CONFIG_FILE = ".nanobot/config.json"
ENDLESS_WINDOW = 10_000_000
"""Tokens. Told where it may not compact: by its own estimate its very first prompt, 32 k, fits few windows."""
SUBAGENT_MARK = "# Subagent\n"
"""Begins the system prompt of a subagent; its calls have no header that says so."""
COMPACTION_MARK = "Create a compact replacement checkpoint for this session."
"""Begins the last message of the call that summarises; all before it is as in the main loop."""
ENV = {"LANG": "C.UTF-8"}


@dataclass(frozen=True, kw_only=True)
class NanobotSettings(HarnessSettings):
    """What a campaign may choose."""

    compact: bool = False
    """Let it summarise a history that outgrows the window, which must have room for more than its first prompt."""
    bash_timeout_s: int = 30
    """Of one command, where the call names no other."""


@dataclass(frozen=True)
class Nanobot:
    """The adapter."""

    settings: NanobotSettings
    install_root: Path

    name: ClassVar[str] = "nanobot"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "0.3.5"
    settings_type: ClassVar[type[HarnessSettings]] = NanobotSettings
    mounts_mcp: ClassVar[bool] = True

    @property
    def install_dir(self) -> Path:
        """See `Harness`."""
        return install_folder(self.install_root, self.name, self.version)

    def check_install(self) -> None:
        """See `Harness`."""
        check_binaries(self.name, self.install_dir, PYTHON_START)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, and its own home."""
        return LaunchPlan(
            argv=(f"{INSTALL_MOUNT}/{PYTHON_START}", ENTRY, request.instruction),
            env=ENV,
            files={CONFIG_FILE: json.dumps(self._config(request))},
            read_only={str(self.install_dir): INSTALL_MOUNT},
        )

    def _config(self, request: LaunchRequest) -> dict[str, Any]:
        return {
            "agents": {
                "defaults": {
                    "workspace": request.workspace_mount,
                    "provider": "custom",
                    "model": request.model,
                    "maxTokens": request.max_output_tokens,
                    "contextWindowTokens": request.context_window if self.settings.compact else ENDLESS_WINDOW,
                    "timezone": "UTC",
                }
            },
            "providers": {"custom": {"apiKey": API_KEY, "apiBase": f"{request.base_url}/v1"}},
            "tools": {
                "exec": {"timeout": self.settings.bash_timeout_s},
                "mcpServers": {
                    server.name: {
                        "type": "stdio",
                        "command": server.argv[0],
                        "args": server.argv[1:],
                        "env": server.env,
                    }
                    for server in request.mcp_servers
                },
            },
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`."""
        del headers
        if any(message.text.startswith(SUBAGENT_MARK) for message in conversation.messages[:1]):
            return CallRole.SUBAGENT, {}
        if any(message.text.startswith(COMPACTION_MARK) for message in conversation.messages[-1:]):
            return CallRole.COMPACTION, {}
        return (CallRole.MAIN if conversation.tools else CallRole.SIDE), {}
