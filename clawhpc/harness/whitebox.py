"""A tool loop of our own, headless: one Python file that comes with clawhpc, OpenAI Chat Completions, never streaming.

It is the open loop that a policy can be trained in where nobody has the harness that it will meet; all that it does is
in containers/harness/whitebox/whitebox.py. It has no MCP, no subagents and no compaction, and nothing to install.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clawhpc.harness.base import CONTAINERS_DIR, Adapter, HarnessSettings, WireName, in_python
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

PROGRAM = "whitebox.py"


@dataclass(frozen=True, kw_only=True)
class WhiteboxSettings(HarnessSettings):
    """What a campaign may choose."""

    max_retries: int = 2
    """Of one failed call, after waits of 0.5 s, 1 s, 2 s."""
    command_timeout_s: int = 30
    """Of one command."""


@dataclass(frozen=True)
class Whitebox(Adapter[WhiteboxSettings]):
    """The adapter."""

    name: ClassVar[str] = "whitebox"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "1.0"
    settings_type: ClassVar[type[HarnessSettings]] = WhiteboxSettings
    mounts_mcp: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = (PROGRAM,)

    @property
    def install_dir(self) -> Path:
        """See `Harness`. It is run where it lies: no version but the one that came with this package."""
        return CONTAINERS_DIR / "harness" / self.name

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        settings = {
            "base_url": f"{request.base_url}/v1",
            "model": request.model,
            "max_tokens": request.max_output_tokens,
            "max_retries": self.settings.max_retries,
            "command_timeout_s": self.settings.command_timeout_s,
        }
        argv = (*in_python(request, PROGRAM), json.dumps(settings), request.instruction)
        return self.plan(argv=argv, env={}, files={})

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. Its main loop is all there is."""
        del headers, conversation
        return CallRole.MAIN, {}
