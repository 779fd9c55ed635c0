"""Claude Code 2.1.328, headless: one native program, Anthropic Messages.

Its own retries, reminders and compaction stay as they are. What is switched off is what reaches outside, what makes one
conversation's requests differ from their own history (cache markers, growing tool lists, a nonce in the system prompt),
and tasks that outlive their call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from clawhpc.harness.base import (
    API_KEY,
    INSTALL_MOUNT,
    MCP_START_S,
    Adapter,
    HarnessSettings,
    WireName,
    kept,
    mcp_entry,
    plain_text,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest, McpServer

PROGRAM = "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
AGENT_HEADER = "x-claude-code-agent-id"
"""Names a subagent; the main loop does not send it."""
BETA_HEADER = "anthropic-beta"
COMPACTION_BETA = "fallback-credit-2026-06-01"
"""The one mark of a compaction call: it has the system prompt, the tools and the history of the main loop."""

CONSTANT_ENV = {
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "CLAUDE_CODE_CERT_STORE": "bundled",
    "BUN_JSC_useDFGJIT": "0",
    "DISABLE_PROMPT_CACHING": "1",
    "ENABLE_TOOL_SEARCH": "false",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
    "MCP_CONNECTION_NONBLOCKING": "false",
    "MCP_TIMEOUT": str(MCP_START_S * 1000),
}
"""IS_SANDBOX lets it skip permissions as root; bundled certificates spare it the reading of three hundred files; and in
a run of a second the optimising compiler takes a tenth of the CPU time and gives nothing back."""


@dataclass(frozen=True, kw_only=True)
class ClaudeCodeSettings(HarnessSettings):
    """What a campaign may choose."""

    bare: bool = True
    """Three tools and a system prompt of two lines: 1 k tokens of head instead of 20 k."""
    compact: bool = False
    """Let it summarise a history that outgrows the window; a window under 8 k tokens leaves it no room for that.
    Else it is not told the window, for it makes no call at all where it thinks it too small: the proxy tells it."""
    thinking_tokens: int = 0
    """Asked for in each call; 0 for a model that does not think."""
    max_retries: int = 2
    """Of one failed call, after waits of 0.5 s, 1 s, 2 s."""
    command_timeout_s: int = 30
    """Of one command."""


@dataclass(frozen=True)
class ClaudeCode(Adapter[ClaudeCodeSettings]):
    """The adapter."""

    name: ClassVar[str] = "claude_code"
    protocol: ClassVar[WireName] = "anthropic"
    version: ClassVar[str] = "2.1.328"
    settings_type: ClassVar[type[HarnessSettings]] = ClaudeCodeSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (PROGRAM,)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        flags = ("--dangerously-skip-permissions", "--no-session-persistence")
        bare = ("--bare",) if self.settings.bare else ()
        mcp = ("--mcp-config", _mcp_config(request.mcp_servers), "--strict-mcp-config") if request.mcp_servers else ()
        return self.plan(
            argv=(f"{INSTALL_MOUNT}/{PROGRAM}", "-p", *bare, *flags, *mcp, "--", plain_text(request.instruction, "/")),
            env=CONSTANT_ENV | self._model_env(request) | self._behaviour_env(),
            files={},
        )

    def _model_env(self, request: LaunchRequest) -> dict[str, str]:
        window = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(request.context_window)}
        return {
            "ANTHROPIC_BASE_URL": request.base_url,
            "ANTHROPIC_API_KEY": API_KEY,
            "ANTHROPIC_MODEL": request.model,
            "ANTHROPIC_SMALL_FAST_MODEL": request.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": request.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(request.max_output_tokens),
            "MAX_THINKING_TOKENS": str(self.settings.thinking_tokens),
        } | (window if self.settings.compact else {"DISABLE_COMPACT": "1"})

    def _behaviour_env(self) -> dict[str, str]:
        timeout_ms = str(self.settings.command_timeout_s * 1000)
        return {
            "CLAUDE_CODE_MAX_RETRIES": str(self.settings.max_retries),
            "BASH_DEFAULT_TIMEOUT_MS": timeout_ms,
            "BASH_MAX_TIMEOUT_MS": timeout_ms,
        }

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`."""
        if AGENT_HEADER in headers:
            return CallRole.SUBAGENT, kept(headers, AGENT_HEADER)
        if COMPACTION_BETA in headers.get(BETA_HEADER, ""):
            return CallRole.COMPACTION, {BETA_HEADER: COMPACTION_BETA}
        return (CallRole.MAIN if conversation.tools else CallRole.SIDE), {}


def _mcp_config(servers: tuple[McpServer, ...]) -> str:
    """Its tools are called mcp__NAME__TOOL."""
    return json.dumps({"mcpServers": {server.name: {"type": "stdio"} | mcp_entry(server) for server in servers}})
