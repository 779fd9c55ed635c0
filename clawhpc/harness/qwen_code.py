"""Qwen Code 0.24.4, headless: a Node program, OpenAI Chat Completions. Node is pinned and installed with it.

It tries a call that failed with an HTTP status seven times, after waits of 1.5 s to 30 s; less cannot be set. An
error within a stream that had begun ends the run at once, with exit code 1. Its compaction cannot be switched off. A
reply that begins with a tag such as `<summary>` is thrown away and asked for again. A background agent's end comes as
a user message of the main loop. Volatile text in its prompts: the day's date, before the instruction; the process
group of each command, and the session's id in the path of a background agent's file, in tool results. The listing of
the workspace, which would stand before the instruction, is switched off.
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
    NODE,
    Adapter,
    HarnessSettings,
    WireName,
    mcp_entry,
    plain_text,
    toolless_role,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

PROGRAM = "node_modules/@qwen-code/qwen-code/cli.js"
"""What its launcher starts in a second process, with this option of Node's."""
NODE_OPTION = "--expose-gc"
SETTINGS_FILE = ".qwen/settings.json"
MAIN_TOOL = "list_agents"
"""Offered to the main loop, and to no agent of whatever kind."""
SUMMARY_MARK = "<state_snapshot>"
"""In the last message of a compaction call, which has no tools."""

CONSTANT_ENV = {
    "OPENAI_API_KEY": API_KEY,
    "QWEN_CODE_NO_RELAUNCH": "1",
    "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
}
CONSTANT_SETTINGS: dict[str, dict[str, Any]] = {
    "general": {"enableAutoUpdate": False, "chatRecording": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "security": {"auth": {"selectedType": "openai"}},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
    "experimental": {"emitToolUseSummaries": False, "cron": False, "artifact": False},
}
"""Nothing outside is reached, and no call is made for what outlives the run: titles, memories, appointments."""


@dataclass(frozen=True, kw_only=True)
class QwenCodeSettings(HarnessSettings):
    """What a campaign may choose."""

    command_timeout_s: int = 30
    """Of one command, unless the model asks for another."""


@dataclass(frozen=True)
class QwenCode(Adapter[QwenCodeSettings]):
    """The adapter."""

    name: ClassVar[str] = "qwen_code"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "0.24.4"
    settings_type: ClassVar[type[HarnessSettings]] = QwenCodeSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (NODE, PROGRAM)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        return self.plan(
            argv=(
                *(f"{INSTALL_MOUNT}/{NODE}", NODE_OPTION, f"{INSTALL_MOUNT}/{PROGRAM}"),
                *("--yolo", "--auth-type", "openai", "--model", request.model),
                *("-p", plain_text(request.instruction, "-", "@", "/")),
            ),
            env=CONSTANT_ENV | {"OPENAI_BASE_URL": f"{request.base_url}/v1"},
            files={SETTINGS_FILE: json.dumps(CONSTANT_SETTINGS | self._settings(request))},
        )

    def _settings(self, request: LaunchRequest) -> dict[str, Any]:
        generation = {
            "contextWindowSize": request.context_window,
            "samplingParams": {"max_tokens": request.max_output_tokens},
            "maxRetries": 0,  # else its client makes four of each of the seven tries
        }
        trusted = {"trust": True, "discoveryTimeoutMs": MCP_START_S * 1000}
        return {
            "model": {"skipStartupContext": True, "generationConfig": generation},
            "tools": {
                "toolSearch": {"enabled": False},
                "useRipgrep": False,  # it comes without leave to be run
                "shell": {"defaultTimeoutMs": self.settings.command_timeout_s * 1000},
            },
            "mcpServers": {server.name: mcp_entry(server) | trusted for server in request.mcp_servers},
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. No header tells; the tools do."""
        del headers
        names = {tool.name for tool in conversation.tools}
        if names:
            return (CallRole.MAIN if MAIN_TOOL in names else CallRole.SUBAGENT), {}
        return toolless_role(conversation, SUMMARY_MARK), {}
