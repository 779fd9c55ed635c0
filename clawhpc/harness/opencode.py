"""opencode 1.18.33, headless: one native program, OpenAI Chat Completions.

It tries a failed call six times, after waits of 2 s to 40 s that cannot be set. After a compaction that a full window
forced it ends with exit code 1, whatever came of the task. Volatile text in its prompts: the day's date, at the end of
the system prompt; the id of a subagent's session, in the result of its task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clawhpc.harness.base import (
    API_KEY,
    INSTALL_MOUNT,
    MCP_START_S,
    Adapter,
    HarnessSettings,
    WireName,
    kept,
    toolless_role,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

PROGRAM = "node_modules/opencode-linux-x64/bin/opencode"
PROVIDER = "proxy"
PARENT_HEADER = "x-parent-session-id"
"""Sent by subagents; the main loop does not send it."""
SESSION_HEADER = "x-session-id"
"""Of the main loop, or of one subagent: those that begin with the same words are told apart by it."""
HISTORY_MARK = "<conversation>"
"""In the one message of a compaction call, which has no tools."""
CONFIG_FILE = ".config/opencode/opencode.json"

CONSTANT_ENV = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_EXPERIMENTAL_DISABLE_FILEWATCHER": "1",
}
CONSTANT_CONFIG: dict[str, Any] = {
    "enabled_providers": [PROVIDER],
    "autoupdate": False,
    "share": "disabled",
    "snapshot": False,
    "lsp": False,
    "formatter": False,
}
"""Nothing outside is reached; and what only helps a person, to go back or to read along, is spared."""


@dataclass(frozen=True, kw_only=True)
class OpencodeSettings(HarnessSettings):
    """What a campaign may choose."""

    compact: bool = False
    """Let it summarise a history that outgrows the window."""
    command_timeout_s: int = 30
    """Of one command, unless the model asks for another."""


@dataclass(frozen=True)
class Opencode(Adapter[OpencodeSettings]):
    """The adapter."""

    name: ClassVar[str] = "opencode"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "1.18.33"
    settings_type: ClassVar[type[HarnessSettings]] = OpencodeSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (PROGRAM,)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told.

        A title spares the call that would find one. The instruction goes in word by word, for it quotes a word with a
        space in it, and joins them by spaces.
        """
        return self.plan(
            argv=(
                *(f"{INSTALL_MOUNT}/{PROGRAM}", "run", "--auto", "--pure", "--title", "rollout"),
                *("--model", f"{PROVIDER}/{request.model}", "--", *request.instruction.split(" ")),
            ),
            env=CONSTANT_ENV
            | {"OPENCODE_EXPERIMENTAL_BASH_DEFAULT_TIMEOUT_MS": str(self.settings.command_timeout_s * 1000)},
            files={CONFIG_FILE: json.dumps(CONSTANT_CONFIG | self._config(request))},
        )

    def _config(self, request: LaunchRequest) -> dict[str, Any]:
        model = {
            "name": request.model,
            "limit": {"context": request.context_window, "output": request.max_output_tokens},
        }
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{request.base_url}/v1", "apiKey": API_KEY},
            "models": {request.model: model},
        }
        return {
            "provider": {PROVIDER: provider},
            "compaction": {"auto": self.settings.compact, "prune": False},
            "mcp": {
                server.name: {
                    "type": "local",
                    "command": server.argv,
                    "environment": server.env,
                    "timeout": MCP_START_S * 1000,
                }
                for server in request.mcp_servers
            },
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`."""
        if PARENT_HEADER in headers:
            return CallRole.SUBAGENT, kept(headers, PARENT_HEADER, SESSION_HEADER)
        if conversation.tools:
            return CallRole.MAIN, {}
        return toolless_role(conversation, HISTORY_MARK), {}
