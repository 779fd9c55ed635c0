"""Gemini CLI 0.61.0, headless: a Node program, Gemini generateContent. Node is pinned and installed with it.

It always streams. What it sends back of a reply is exact but for reasoning, which it drops, and numbers, which it reads
as JavaScript does. A reply without text and calls is asked for again, with a nudge for a last message. On a single
instruction it never compacts: it would cut its history at a second one. Volatile text in its prompts: the day's date,
before the instruction, and the process group of each command, in tool results. The listing of the workspace, which
would stand before the instruction, is switched off. A server of the task has ten minutes to start: the same limit is
that of a call of its tools, and is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clawhpc.harness.base import (
    API_KEY,
    INSTALL_MOUNT,
    NODE,
    Adapter,
    HarnessSettings,
    WireName,
    mcp_entry,
    plain_text,
    toolless_role,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

PROGRAM = "node_modules/@google/gemini-cli/bundle/gemini.js"
SETTINGS_FILE = ".gemini/settings.json"
AGENT_TOOL = "complete_task"
"""Offered to every subagent, for its last word, and never to the main loop."""
SUMMARY_MARK = "<state_snapshot>"
"""In the last message of a compaction call, which has no tools."""

CONSTANT_ENV = {"GEMINI_API_KEY": API_KEY, "GEMINI_CLI_NO_RELAUNCH": "1"}
BARE_ENV = {
    f"GEMINI_PROMPT_{section}": "0"
    for section in ("COREMANDATES", "PRIMARYWORKFLOWS", "OPERATIONALGUIDELINES", "SANDBOX", "GIT", "HOOKCONTEXT")
}
"""Sections of the system prompt that are left out."""
CONSTANT_SETTINGS: dict[str, dict[str, Any]] = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
    "model": {"skipNextSpeakerCheck": True, "disableLoopDetection": True},
    "context": {"includeDirectoryTree": False},
    "advanced": {"ignoreLocalEnv": True},
}
"""Nothing outside is reached, no call judges the run, and no file of the workspace says where the proxy is."""
UPDATES = {"enableAutoUpdate": False, "enableAutoUpdateNotification": False}
BARE_GENERAL = {"topicUpdateNarration": False, "plan": {"enabled": False}}
BARE_SETTINGS: dict[str, dict[str, Any]] = {
    "experimental": {"enableAgents": False},
    "skills": {"enabled": False},
    "hooksConfig": {"enabled": False},
}
BARE_TOOLS = ["read_file", "write_file", "run_shell_command", "mcp_*"]
WEB_TOOLS = ["google_web_search", "web_fetch"]
"""They ask the provider to search, and there is no network."""


@dataclass(frozen=True, kw_only=True)
class GeminiCliSettings(HarnessSettings):
    """What a campaign may choose."""

    bare: bool = True
    """Three tools and a system prompt of two sentences: 1 k tokens of head instead of 11 k."""
    max_retries: int = 2
    """Of one failed call, after waits of about 5 s, 10 s; after 1 s, 2 s where a reply was empty or broken."""
    silence_timeout_s: int = 30
    """Of a command that prints nothing."""


@dataclass(frozen=True)
class GeminiCli(Adapter[GeminiCliSettings]):
    """The adapter."""

    name: ClassVar[str] = "gemini_cli"
    protocol: ClassVar[WireName] = "gemini"
    version: ClassVar[str] = "0.61.0"
    settings_type: ClassVar[type[HarnessSettings]] = GeminiCliSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (NODE, PROGRAM)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        return self.plan(
            argv=(
                *(f"{INSTALL_MOUNT}/{NODE}", f"{INSTALL_MOUNT}/{PROGRAM}"),
                *("--yolo", "--model", request.model, "-p", plain_text(request.instruction, "-", "@", "/")),
            ),
            env=CONSTANT_ENV | (BARE_ENV if self.settings.bare else {}) | {"GOOGLE_GEMINI_BASE_URL": request.base_url},
            files={SETTINGS_FILE: json.dumps(self._settings(request))},
        )

    def _settings(self, request: LaunchRequest) -> dict[str, Any]:
        generation = {"generateContentConfig": {"maxOutputTokens": request.max_output_tokens}}
        shell = {"enableInteractiveShell": False, "inactivityTimeout": self.settings.silence_timeout_s}
        general = UPDATES | {"maxAttempts": 1 + self.settings.max_retries}
        own = {
            "general": general | BARE_GENERAL if self.settings.bare else general,
            "tools": {"shell": shell} | ({"core": BARE_TOOLS} if self.settings.bare else {"exclude": WEB_TOOLS}),
            "modelConfigs": {"customOverrides": [{"match": {"model": request.model}, "modelConfig": generation}]},
            "mcpServers": {server.name: mcp_entry(server) | {"trust": True} for server in request.mcp_servers},
        }
        return CONSTANT_SETTINGS | (BARE_SETTINGS if self.settings.bare else {}) | own

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. No header tells; the tools do."""
        del headers
        names = {tool.name for tool in conversation.tools}
        if names:
            return (CallRole.SUBAGENT if AGENT_TOOL in names else CallRole.MAIN), {}
        return toolless_role(conversation, SUMMARY_MARK), {}
