"""Pi 0.73.1, headless: a Node program, OpenAI Chat Completions. Node is pinned and installed with it.

It has no MCP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from clawhpc.harness.base import (
    API_KEY,
    INSTALL_MOUNT,
    NODE,
    Adapter,
    HarnessSettings,
    WireName,
    plain_text,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

PROGRAM = "node_modules/@mariozechner/pi-coding-agent/dist/cli.js"
PROVIDER = "proxy"
MODELS_FILE = ".pi/agent/models.json"
SETTINGS_FILE = ".pi/agent/settings.json"
CONSTANT_ENV = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}


@dataclass(frozen=True, kw_only=True)
class PiSettings(HarnessSettings):
    """What a campaign may choose."""

    compact: bool = False
    """Let it summarise a history that outgrows the window; a window under 40 k tokens leaves it no room for that."""


@dataclass(frozen=True)
class Pi(Adapter[PiSettings]):
    """The adapter."""

    name: ClassVar[str] = "pi"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "0.73.1"
    settings_type: ClassVar[type[HarnessSettings]] = PiSettings
    mounts_mcp: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = (NODE, PROGRAM)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        entry = {
            "id": request.model,
            "contextWindow": request.context_window,
            "maxTokens": request.max_output_tokens,
        }
        provider = {
            "baseUrl": f"{request.base_url}/v1",
            "api": "openai-completions",
            "apiKey": API_KEY,
            "models": [entry],
        }
        return self.plan(
            argv=(
                *(f"{INSTALL_MOUNT}/{NODE}", f"{INSTALL_MOUNT}/{PROGRAM}"),
                *("--provider", PROVIDER, "--model", request.model, "--no-session", "--offline"),
                *("-p", plain_text(request.instruction, "-", "@", "/")),
            ),
            env=CONSTANT_ENV,
            files={
                MODELS_FILE: json.dumps({"providers": {PROVIDER: provider}}),
                SETTINGS_FILE: json.dumps({"compaction": {"enabled": self.settings.compact}}),
            },
        )

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. It has no subagents; the call that summarises is the one without tools."""
        del headers
        return (CallRole.MAIN if conversation.tools else CallRole.COMPACTION), {}
