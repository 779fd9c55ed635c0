"""nanobot 0.3.5 (PyPI's nanobot-ai), headless: a Python program, OpenAI Chat Completions.

It runs through its Python interface (containers/harness/nanobot/run_nanobot.py), because its command would put a git
repository, a persona and a memory into the workspace. What is left of that, `.nanobot/workspace-id` and a folder
`memory`, is taken away at the end, and stays where a run is stopped. It tries a failed call again after 1 s, 2 s, 4 s.
It ends with its main loop: subagents that still work then are lost. It waits for the servers of a task for as long as
they take to start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clawhpc.harness.base import (
    API_KEY,
    PYTHON_START,
    Adapter,
    HarnessSettings,
    WireName,
    in_python,
    mcp_entry,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

ENTRY = "run_nanobot:main"
CONFIG_FILE = ".nanobot/config.json"
ENDLESS_WINDOW = 10_000_000
"""Tokens. Told where it may not compact: by its own estimate its very first prompt, 32 k, fits few windows."""
MAIN_TOOL = "spawn"
"""Offered to the main loop, and to no subagent."""
COMPACTION_MARK = "replacement checkpoint"
"""In the first line of the last message of the call that summarises; all before it is as in the main loop."""


@dataclass(frozen=True, kw_only=True)
class NanobotSettings(HarnessSettings):
    """What a campaign may choose."""

    compact: bool = False
    """Let it summarise a history that outgrows the window, which must have room for more than its first prompt."""
    command_timeout_s: int = 30
    """Of one command, where the call names no other."""


@dataclass(frozen=True)
class Nanobot(Adapter[NanobotSettings]):
    """The adapter."""

    name: ClassVar[str] = "nanobot"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "0.3.5"
    settings_type: ClassVar[type[HarnessSettings]] = NanobotSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (PYTHON_START,)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, and its own home."""
        return self.plan(
            argv=(*in_python(request, PYTHON_START), ENTRY, request.instruction),
            env={},
            files={CONFIG_FILE: json.dumps(self._config(request))},
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
                "exec": {"timeout": self.settings.command_timeout_s},
                "mcpServers": {server.name: {"type": "stdio"} | mcp_entry(server) for server in request.mcp_servers},
            },
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. No header tells; the tools and the last message do."""
        del headers
        names = {tool.name for tool in conversation.tools}
        if names and MAIN_TOOL not in names:
            return CallRole.SUBAGENT, {}
        if any(COMPACTION_MARK in message.text.partition("\n")[0] for message in conversation.messages[-1:]):
            return CallRole.COMPACTION, {}
        return (CallRole.MAIN if names else CallRole.SIDE), {}
