from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawhpc.harness.claude_code import ClaudeCode, ClaudeCodeSettings
from clawhpc.records import CallRole, Conversation
from tests.fakes.launch import LAB, URL, asked, launch

MAIN_LOOP = asked("Do it.", tools=("Bash",))


def claude(**settings: int | bool) -> ClaudeCode:
    return ClaudeCode(ClaudeCodeSettings(**settings), Path("/cache/harness"))  # type: ignore[arg-type]


def test_claude_code_is_kept_from_the_outside_and_from_rewriting_its_history() -> None:
    env = launch(claude()).env
    assert env["ANTHROPIC_BASE_URL"] == URL
    assert {
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_PROMPT_CACHING": "1",
        "ENABLE_TOOL_SEARCH": "false",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
        "MAX_THINKING_TOKENS": "0",
        "CLAUDE_CODE_MAX_RETRIES": "2",
        "MCP_CONNECTION_NONBLOCKING": "false",
        "MCP_TIMEOUT": "60000",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
    }.items() <= env.items()


def test_claude_code_asks_the_policy_for_everything_whatever_tier_it_wants() -> None:
    env = launch(claude()).env
    tiers = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    assert {env[tier] for tier in tiers} == {"policy"}


def test_the_full_mode_of_claude_code_is_a_flag_less() -> None:
    bare, full = launch(claude()).argv, launch(claude(bare=False)).argv
    assert tuple(word for word in bare if word != "--bare") == full
    assert "--bare" in bare


def test_claude_code_is_told_the_window_only_where_it_may_compact() -> None:
    told, untold = launch(claude(compact=True)).env, launch(claude()).env
    assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "2048"
    assert "DISABLE_COMPACT" not in told
    assert untold["DISABLE_COMPACT"] == "1"
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in untold


def test_claude_code_mounts_the_servers_of_the_task_and_no_others() -> None:
    argv = launch(claude(), servers=(LAB,)).argv
    entry = {"type": "stdio", "command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}}
    assert json.loads(argv[argv.index("--mcp-config") + 1]) == {"mcpServers": {"lab": entry}}
    assert argv[-3:] == ("--strict-mcp-config", "--", "Do it.")


def test_claude_code_bounds_each_command() -> None:
    env = launch(claude(command_timeout_s=5)).env
    assert env["BASH_DEFAULT_TIMEOUT_MS"] == env["BASH_MAX_TIMEOUT_MS"] == "5000"


def test_an_instruction_that_looks_like_an_option_or_a_command_of_claude_code_is_none() -> None:
    assert launch(claude(), "--version").argv[-2:] == ("--", "--version")
    assert launch(claude(), "/init").argv[-2:] == ("--", " /init")


@pytest.mark.parametrize(
    ("headers", "conversation", "role", "kept"),
    [
        ({"x-claude-code-agent-id": "a1"}, MAIN_LOOP, CallRole.SUBAGENT, {"x-claude-code-agent-id": "a1"}),
        (
            {"anthropic-beta": "x,fallback-credit-2026-06-01"},
            MAIN_LOOP,
            CallRole.COMPACTION,
            {"anthropic-beta": "fallback-credit-2026-06-01"},
        ),
        ({"anthropic-beta": "x", "x-api-key": "k"}, MAIN_LOOP, CallRole.MAIN, {}),
        ({}, asked("Judge it."), CallRole.SIDE, {}),
    ],
)
def test_claude_code_says_in_its_headers_what_a_call_is_for(
    headers: dict[str, str], conversation: Conversation, role: CallRole, kept: dict[str, str]
) -> None:
    assert claude().classify(headers, conversation) == (role, kept)
