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
from typing import Any, ClassVar

from clawhpc.harness.base import (
    API_KEY,
    MCP_START_S,
    PYTHON_START,
    Adapter,
    HarnessSettings,
    WireName,
    in_python,
    mcp_entry,
    plain_text,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

ENTRY = "run_hermes:main"
CONFIG_FILE = ".hermes/config.yaml"
CONSTANT_ENV = {"HERMES_YOLO_MODE": "1"}
LEAST_WINDOW = 64_000
"""Tokens. It refuses to start with less, and so is told this; the proxy tells it when the true window is full."""
MAIN_TOOL = "delegate_task"
"""Offered to the main loop, and to no subagent: these may start none of their own."""


@dataclass(frozen=True, kw_only=True)
class HermesSettings(HarnessSettings):
    """What a campaign may choose."""

    compact: bool = False
    """Let it summarise a history that outgrows half of the window that it was told, or that the proxy calls full."""
    max_retries: int = 2
    """Of one failed call, after waits of 3 s, 5 s."""
    command_timeout_s: int = 30
    """Of one command, where the call names no other."""


@dataclass(frozen=True)
class Hermes(Adapter[HermesSettings]):
    """The adapter."""

    name: ClassVar[str] = "hermes"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "0.19.0"
    settings_type: ClassVar[type[HarnessSettings]] = HermesSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (PYTHON_START,)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        return self.plan(
            argv=(*in_python(request, PYTHON_START), ENTRY, "--oneshot", plain_text(request.instruction, "-")),
            env=CONSTANT_ENV,
            files={CONFIG_FILE: json.dumps(self._config(request))},
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
            "terminal": {"timeout": self.settings.command_timeout_s},
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
                server.name: mcp_entry(server) | {"connect_timeout": MCP_START_S} for server in request.mcp_servers
            },
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. No header tells; the tools do. The call without tools is the one that summarises."""
        del headers
        names = {tool.name for tool in conversation.tools}
        if not names:
            return CallRole.COMPACTION, {}
        return (CallRole.MAIN if MAIN_TOOL in names else CallRole.SUBAGENT), {}
