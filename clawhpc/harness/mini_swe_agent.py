"""mini-swe-agent 2.4.6, headless: a Python program, OpenAI Chat Completions, never streaming.

It has one tool, `bash`, and no MCP, no subagents and no compaction. It ends when a command prints the line that its
prompt names; a reply without a call is an error that it tells the model, and the third in a row ends the run. Its first
message holds the kernel's version, and so differs between hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from clawhpc.harness.base import (
    API_KEY,
    PYTHON_START,
    Adapter,
    HarnessSettings,
    WireName,
    in_python,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

ENTRY = "minisweagent.run.mini:app"
CONSTANT_ENV = {
    "OPENAI_API_KEY": API_KEY,
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TYPER_STANDARD_TRACEBACK": "1",
}
"""Prices come from a file, not from the network. One attempt of its own: its client's retries come below it, and what
they do not mend, such as a prompt that does not fit, would be asked for again after 4 s, 4 s, 8 s, ..."""


@dataclass(frozen=True, kw_only=True)
class MiniSweAgentSettings(HarnessSettings):
    """What a campaign may choose."""

    max_retries: int = 2
    """Of one failed call, after waits of 0.5 s, 1 s, 2 s."""
    command_timeout_s: int = 30
    """Of one command."""


@dataclass(frozen=True)
class MiniSweAgent(Adapter[MiniSweAgentSettings]):
    """The adapter."""

    name: ClassVar[str] = "mini_swe_agent"
    protocol: ClassVar[WireName] = "openai_chat"
    version: ClassVar[str] = "2.4.6"
    settings_type: ClassVar[type[HarnessSettings]] = MiniSweAgentSettings
    mounts_mcp: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = (PYTHON_START,)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        choices = (
            f"model.model_kwargs.max_tokens={request.max_output_tokens}",
            f"model.model_kwargs.max_retries={self.settings.max_retries}",
            f"environment.timeout={self.settings.command_timeout_s}",
        )
        return self.plan(
            argv=(
                *(*in_python(request, PYTHON_START), ENTRY, "--yolo", "--exit-immediately", "--cost-limit", "0"),
                *("--output", "/dev/null", "--model", f"openai/{request.model}", "--config", "mini.yaml"),
                *(word for choice in choices for word in ("--config", choice)),
                *("--task", request.instruction),
            ),
            env=CONSTANT_ENV | {"OPENAI_API_BASE": f"{request.base_url}/v1"},
            files={},
        )

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`. Its main loop is all there is."""
        del headers, conversation
        return CallRole.MAIN, {}
