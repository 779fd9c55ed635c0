"""What the suite must know of each harness: how its tools are called, and what it has not got."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from clawhpc.harness.base import HarnessSettings
from clawhpc.harness.claude_code import ClaudeCodeSettings
from clawhpc.harness.codex import CodexSettings
from clawhpc.harness.gemini_cli import GeminiCliSettings
from clawhpc.harness.hermes import HermesSettings
from clawhpc.harness.mini_swe_agent import MiniSweAgentSettings
from clawhpc.harness.nanobot import NanobotSettings
from clawhpc.harness.openclaw import OpenClawSettings
from clawhpc.harness.opencode import OpencodeSettings
from clawhpc.harness.pi import PiSettings
from clawhpc.harness.qwen_code import QwenCodeSettings
from clawhpc.harness.whitebox import WhiteboxSettings
from clawhpc.tasks.oracle import SUBMIT_COMMAND

MCP_SERVER = "adder-of_two"
"""The name under which the task declares its server; its one tool is `add`. Some harnesses do not take it as it is."""

NO_MCP = dict.fromkeys(("mcp_tool", "mcp_broken", "mcp_host", "mcp_host_broken"), "it has no MCP")
"""Scenario -> why it makes no sense there."""
QUICK = frozenset(
    (
        *("parallel_calls", "thinking", "unicode", "length_stop", "empty_reply", "engine_error", "cut_stream"),
        *("lost_answer", "context_overflow", "compaction", "mcp_tool"),
    )
)
"""For one harness of a protocol: what differs from protocol to protocol. The rest is the harness's own affair."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One harness in one configuration."""

    label: str
    """In the table."""
    name: str
    """Of the adapter."""
    settings: HarnessSettings
    shell: str
    """The tool that runs a shell command."""
    shell_arguments: Callable[[str], dict[str, object]] = lambda command: {"command": command}
    compacting: HarnessSettings | None = None
    """Settings under which it summarises a history that does not fit."""
    early_window: int = 0
    """Tokens. It compacts by its own reckoning, before a prompt is refused: told this window, after long results."""
    long_history: bool = False
    """It compacts a history that was refused only where that is long."""
    thinking: HarnessSettings | None = None
    """Settings for a policy that thinks; None: as ever."""
    subagent: str = ""
    """The tool that starts a subagent."""
    subagent_arguments: dict[str, object] = field(default_factory=dict)
    mcp_tool: str = ""
    """How the model calls the tool of the task's server."""
    ending: str = ""
    """A command by which the model ends a run; empty: any reply without a tool call does."""
    cannot: dict[str, str] = field(default_factory=dict)
    """Scenario -> why it makes no sense here."""
    own_words: dict[str, str] = field(default_factory=dict)
    """Scenario -> what it says there in the assistant's name."""
    breaks: dict[str, str] = field(default_factory=dict)
    """One of laws.TOLD -> why it does not hold here. What is declared must be so."""
    by_clock: frozenset[str] = frozenset()
    """Scenarios in which it asks again until a time is over: how often, is the machine's affair."""
    quick: frozenset[str] = frozenset({"unicode"})
    """The scenarios of every test run; the others are slow."""

    def run(self, command: str) -> str:
        """What a policy says to run `command`."""
        return tool_call(self.shell, self.shell_arguments(command))

    @property
    def last_word(self) -> str:
        """What a policy says when all is done."""
        return self.run(self.ending) if self.ending else "Done."


def tool_call(name: str, arguments: object) -> str:
    """A tool call as the policy draws it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


CLAUDE_CODE_BARE = Profile(
    label="claude_code bare",
    name="claude_code",
    settings=ClaudeCodeSettings(),
    compacting=ClaudeCodeSettings(compact=True),
    thinking=ClaudeCodeSettings(thinking_tokens=400),
    quick=QUICK | {"mcp_host"},
    shell="Bash",
    mcp_tool=f"mcp__{MCP_SERVER}__add",
    cannot={"subagent": "its three tools start none"},
)
CLAUDE_CODE_FULL = Profile(
    label="claude_code full",
    name="claude_code",
    settings=ClaudeCodeSettings(bare=False),
    compacting=ClaudeCodeSettings(bare=False, compact=True),
    thinking=ClaudeCodeSettings(bare=False, thinking_tokens=400),
    quick=frozenset({"subagent"}),
    shell="Bash",
    shell_arguments=lambda command: {"command": command, "description": "Run it"},
    subagent="Agent",
    subagent_arguments={
        "description": "d",
        "prompt": "Say done.",
        "subagent_type": "general-purpose",
        "run_in_background": False,
    },
    mcp_tool=f"mcp__{MCP_SERVER}__add",
)
PI = Profile(
    label="pi",
    name="pi",
    settings=PiSettings(),
    compacting=PiSettings(compact=True),
    quick=frozenset({"unicode", "cut_stream", "compaction"}),
    shell="bash",
    cannot={"subagent": "it has no subagents", **NO_MCP},
)
QWEN_CODE = Profile(
    label="qwen_code",
    name="qwen_code",
    settings=QwenCodeSettings(),
    shell="run_shell_command",
    shell_arguments=lambda command: {"command": command, "is_background": False},
    subagent="agent",
    subagent_arguments={"description": "d", "prompt": "Say done.", "subagent_type": "general-purpose"},
    mcp_tool=f"mcp__{MCP_SERVER}__add",
    own_words={"compaction": "it accepts the summary, and lets the model go on from there in the same message"},
)
OPENCODE = Profile(
    label="opencode",
    name="opencode",
    settings=OpencodeSettings(),
    compacting=OpencodeSettings(compact=True),
    shell="bash",
    subagent="task",
    subagent_arguments={"description": "d", "prompt": "Say done.", "subagent_type": "general"},
    mcp_tool=f"{MCP_SERVER}_add",
)
GEMINI_CLI = Profile(
    label="gemini_cli bare",
    name="gemini_cli",
    settings=GeminiCliSettings(),
    quick=frozenset({"unicode", "lost_answer"}),
    shell="run_shell_command",
    mcp_tool=f"mcp_{MCP_SERVER}_add",
    cannot={
        "subagent": "its three tools start none",
        "compaction": "it compacts only before a second instruction, and there is one",
    },
)
GEMINI_CLI_FULL = Profile(
    label="gemini_cli full",
    name="gemini_cli",
    settings=GeminiCliSettings(bare=False),
    shell="run_shell_command",
    subagent="invoke_agent",
    subagent_arguments={"agent_name": "generalist", "prompt": "Say done."},
    mcp_tool=f"mcp_{MCP_SERVER}_add",
    cannot={"compaction": "it compacts only before a second instruction, and there is one"},
)
MINI_SWE_AGENT = Profile(
    label="mini_swe_agent",
    name="mini_swe_agent",
    settings=MiniSweAgentSettings(),
    shell="bash",
    ending=SUBMIT_COMMAND,
    cannot={
        "compaction": "it never compacts",
        "subagent": "it has no subagents",
        **NO_MCP,
    },
)
HERMES = Profile(
    label="hermes",
    name="hermes",
    settings=HermesSettings(),
    compacting=HermesSettings(compact=True),
    early_window=100_000,
    shell="terminal",
    subagent="delegate_task",
    subagent_arguments={"goal": "Say done."},
    mcp_tool="mcp__adder_of_two__add",
    own_words={"compaction": "it writes the summary in place of the replies that it summarises"},
)
NANOBOT = Profile(
    label="nanobot",
    name="nanobot",
    settings=NanobotSettings(),
    compacting=NanobotSettings(compact=True),
    early_window=60_000,
    shell="exec",
    subagent="spawn",
    subagent_arguments={"task": "Say done.", "wait": True},
    mcp_tool=f"mcp_{MCP_SERVER}_add",
)
OPENCLAW = Profile(
    label="openclaw",
    name="openclaw",
    settings=OpenClawSettings(),
    long_history=True,
    shell="exec",
    mcp_tool=f"{MCP_SERVER}__add",
    cannot={"subagent": "without its gateway its subagents do not start"},
    by_clock=frozenset({"engine_errors", "status_errors"}),
)
CODEX = Profile(
    label="codex",
    name="codex",
    settings=CodexSettings(),
    compacting=CodexSettings(compact=True),
    early_window=70_000,
    quick=QUICK | {"subagent"},
    shell="exec_command",
    shell_arguments=lambda command: {"cmd": command},
    subagent="multi_agent_v1__spawn_agent",
    subagent_arguments={"message": "Say done."},
    mcp_tool="mcp__adder_of_two__add",
    breaks={"max_tokens": "its protocol has the field, and it never sends it"},
)
WHITEBOX = Profile(
    label="whitebox",
    name="whitebox",
    settings=WhiteboxSettings(),
    quick=frozenset(
        {"parallel_calls", "unicode", "wrong_arguments", "unknown_tool", "lost_answer", "context_overflow"}
    ),
    shell="bash",
    cannot={
        "compaction": "it never compacts",
        "subagent": "it has no subagents",
        **NO_MCP,
    },
)

PROFILES = {
    profile.label: profile
    for profile in (
        CLAUDE_CODE_BARE,
        CLAUDE_CODE_FULL,
        OPENCLAW,
        CODEX,
        PI,
        QWEN_CODE,
        OPENCODE,
        GEMINI_CLI,
        GEMINI_CLI_FULL,
        MINI_SWE_AGENT,
        HERMES,
        NANOBOT,
        WHITEBOX,
    )
}
