"""OpenClaw 2026.9.6, headless: a Node program, OpenAI Chat Completions. Node is pinned and installed with it.

One turn of its embedded agent, without its gateway, and so without subagents: it offers them, but they do not start. A
prompt that does not fit makes it summarise, in up to three calls, unless the history is short; then it ends. Volatile
text in its prompts: the day's date, in the system prompt; the minute, before the instruction, and the kernel's version
after it; and a last message of its own, with which each call ends and which the next one's history lacks. Session ids
would be random, and are set.
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

PROGRAM = "node_modules/openclaw/openclaw.mjs"
NODE_OPTIONS = ("--preserve-symlinks", "--preserve-symlinks-main", "--max-semi-space-size=64")
"""It loads five thousand modules, some of them in eight threads: without a look for links in each path, and with fewer
collections of garbage, that takes a fifth less CPU time."""
COMPILE_CACHE = "compile-cache"
"""In the install, made with it: what Node compiled. It is read only, and a module that is not in it is compiled. A
command `node` of the model inherits the variable, finds nothing of its own there, and compiles as ever."""
LEAST_WINDOW = 4000
"""Tokens. It refuses to start with less, and so is told this; the proxy tells it when the true window is full."""
PROVIDER = "proxy"
SESSION = "rollout"
CONFIG_FILE = ".openclaw/openclaw.json"
HISTORY_MARK = "<conversation>"
"""In the last message of a compaction call, which has no tools."""

FEW_TOOLS = ("apply_patch", "edit", "exec", "ls", "process", "read", "write")
"""For files and commands. The others serve a person's channels, devices, appointments and dashboards."""

CONSTANT_ENV = {
    "OPENCLAW_NO_AUTO_UPDATE": "1",
    "OPENCLAW_DISABLE_BUNDLED_PLUGINS": "1",
    "OPENCLAW_NO_RESPAWN": "1",
    "OPENCLAW_PACKAGED_COMPILE_CACHE_RESPAWNED": "1",
    "NODE_COMPILE_CACHE": f"{INSTALL_MOUNT}/{COMPILE_CACHE}",
    "NODE_COMPILE_CACHE_PORTABLE": "1",
}
"""It would start itself twice over, to choose a compile cache and to widen its own limits."""


@dataclass(frozen=True, kw_only=True)
class OpenClawSettings(HarnessSettings):
    """What a campaign may choose."""

    bare: bool = True
    """Seven tools; else all forty-three of them, twenty thousand tokens."""
    compact: bool = False
    """Let it summarise a history before the window is full; that it does so afterwards cannot be switched off."""


@dataclass(frozen=True)
class OpenClaw(Adapter[OpenClawSettings]):
    """The adapter."""

    name: ClassVar[str] = "openclaw"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "2026.9.6"
    settings_type: ClassVar[type[HarnessSettings]] = OpenClawSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (NODE, PROGRAM)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`."""
        return self.plan(
            argv=(
                *(f"{INSTALL_MOUNT}/{NODE}", *NODE_OPTIONS, f"{INSTALL_MOUNT}/{PROGRAM}"),
                *("agent", "--local", "--agent", "main", "--session-id", SESSION),
                *("--message", plain_text(request.instruction, "-", "/")),
            ),
            env=CONSTANT_ENV,
            files={CONFIG_FILE: json.dumps(self._config(request))},
        )

    def _config(self, request: LaunchRequest) -> dict[str, Any]:
        model = {
            "id": request.model,
            "name": request.model,
            "contextWindow": max(request.context_window, LEAST_WINDOW),
            "maxTokens": request.max_output_tokens,
        }
        provider = {
            "baseUrl": f"{request.base_url}/v1",
            "apiKey": API_KEY,
            "api": "openai-completions",
            "models": [model],
        }
        timeout = {"connectionTimeoutMs": MCP_START_S * 1000}
        servers = {server.name: mcp_entry(server) | timeout for server in request.mcp_servers}
        few = {"allow": [*FEW_TOOLS, *(f"{name}__*" for name in servers)]}
        return {
            "models": {"mode": "replace", "providers": {PROVIDER: provider}},
            "agents": {
                "defaults": {
                    "model": {"primary": f"{PROVIDER}/{request.model}"},
                    "workspace": request.workspace_mount,
                    "skipBootstrap": True,
                    "compaction": {"enabled": self.settings.compact},
                }
            },
            "tools": {"toolSearch": False} | (few if self.settings.bare else {}),
            "mcp": {"servers": servers},
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. No header tells."""
        del headers
        if conversation.tools:
            return CallRole.MAIN, {}
        return toolless_role(conversation, HISTORY_MARK), {}
