"""Codex 0.171.0, headless: one native program, OpenAI Responses.

It does not tell the model's output limit, and a prompt that does not fit ends it: it compacts before, by the usage that
it is told. Volatile text in its prompts: the day's date, before the instruction; a random id and the wall time of each
command, in its result; a random id and name of each subagent, in the result of spawn_agent. Session ids stand in
headers and metadata only.
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
    mcp_entry,
)
from clawhpc.records import CallRole, Conversation, LaunchPlan, LaunchRequest

PROGRAM = "node_modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex"
PROVIDER = "proxy"
KEY_VARIABLE = "PROXY_API_KEY"
CONFIG_FILE = ".codex/config.toml"
SUBAGENT_HEADER = "x-openai-subagent"
"""Names the kind of a subagent; the main loop does not send it."""
TURN_HEADER = "x-codex-turn-metadata"
"""JSON about a call; its request_kind is turn or compaction. The rest of it, such as a time, is not the same when the
call is made again."""
THREAD_HEADER = "thread-id"
"""Of the main loop, or of one subagent: those that begin with the same words are told apart by it."""

CONSTANT_CONFIG: dict[str, Any] = {
    "check_for_update_on_startup": False,
    "web_search": "disabled",
    "analytics": {"enabled": False},
    "feedback": {"enabled": False},
    "otel": {"exporter": "none"},
    "history": {"persistence": "none"},
    "features": {"apps": False, "enable_request_compression": False},
}
"""Nothing outside is reached; and bodies stay readable."""


@dataclass(frozen=True, kw_only=True)
class CodexSettings(HarnessSettings):
    """What a campaign may choose."""

    compact: bool = False
    """Let it summarise a history that outgrows nine tenths of the window. Else it is not told the window, and believes
    in a much larger one: the proxy says where it ends."""
    max_retries: int = 2
    """Of one failed call, and of one broken stream, after waits of 0.2 s, 0.4 s."""


@dataclass(frozen=True)
class Codex(Adapter[CodexSettings]):
    """The adapter."""

    name: ClassVar[str] = "codex"
    protocol: ClassVar[WireName] = "openai_responses"
    version: ClassVar[str] = "0.171.0"
    settings_type: ClassVar[type[HarnessSettings]] = CodexSettings
    mounts_mcp: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = (PROGRAM,)

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        """See `Harness`. The workspace is its current directory, so it need not be told."""
        return self.plan(
            argv=(
                *(f"{INSTALL_MOUNT}/{PROGRAM}", "exec", "--skip-git-repo-check", "--ephemeral"),
                "--dangerously-bypass-approvals-and-sandbox",
                *("--", request.instruction),
            ),
            env={KEY_VARIABLE: API_KEY},
            files={CONFIG_FILE: toml_table(CONSTANT_CONFIG | self._config(request))},
        )

    def _config(self, request: LaunchRequest) -> dict[str, Any]:
        provider = {
            "name": PROVIDER,
            "base_url": f"{request.base_url}/v1",
            "wire_api": "responses",
            "env_key": KEY_VARIABLE,
            "request_max_retries": self.settings.max_retries,
            "stream_max_retries": self.settings.max_retries,
        }
        started = {"required": True, "startup_timeout_sec": MCP_START_S}
        window = {"model_context_window": request.context_window}
        return {
            "model": request.model,
            "model_provider": PROVIDER,
            "model_providers": {PROVIDER: provider},
            "mcp_servers": {server.name: mcp_entry(server) | started for server in request.mcp_servers},
        } | (window if self.settings.compact else {})

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        """See `Harness`."""
        if SUBAGENT_HEADER in headers:
            return CallRole.SUBAGENT, kept(headers, SUBAGENT_HEADER, THREAD_HEADER)
        if request_kind(headers) == "compaction":
            return CallRole.COMPACTION, {TURN_HEADER: "compaction"}
        return (CallRole.MAIN if conversation.tools else CallRole.SIDE), {}


def request_kind(headers: Mapping[str, str]) -> str:
    """What the header says that the call is; empty where it says nothing."""
    try:
        metadata = json.loads(headers.get(TURN_HEADER, "{}"))
    except (ValueError, RecursionError):  # the policy can send what it likes
        return ""
    return str(metadata.get("request_kind", "")) if isinstance(metadata, dict) else ""


def toml_table(table: Mapping[str, Any]) -> str:
    """One line for each key; a table within it is written inline, whatever its depth."""
    return "".join(f"{toml_value(key)} = {toml_value(value)}\n" for key, value in table.items())


def toml_value(value: Any) -> str:
    """As TOML: written as in JSON, but for tables, and for one character that TOML does not allow as it is."""
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
