from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.harness.qwen_code import QwenCode, QwenCodeSettings
from clawhpc.records import CallRole, LaunchRequest
from tests.fakes.launch import LAB, URL, asked, launch_request


def qwen(**settings: int) -> QwenCode:
    return QwenCode(QwenCodeSettings(**settings), Path("/cache/harness"))


def settings_of(harness: QwenCode, request: LaunchRequest) -> dict[str, Any]:
    return json.loads(harness.launch_plan(request).files[".qwen/settings.json"])


def test_qwen_code_finds_the_proxy_and_knows_the_limits_of_the_model() -> None:
    env = qwen().launch_plan(launch_request()).env
    assert env["OPENAI_BASE_URL"] == f"{URL}/v1"
    generation = settings_of(qwen(), launch_request(context_window=9000))["model"]["generationConfig"]
    assert generation["contextWindowSize"] == 9000
    assert generation["samplingParams"] == {"max_tokens": 256}
    assert generation["maxRetries"] == 0


def test_qwen_code_is_kept_from_the_outside_and_makes_no_calls_of_its_own() -> None:
    settings = settings_of(qwen(), launch_request())
    assert settings["privacy"] == {"usageStatisticsEnabled": False}
    assert settings["telemetry"] == {"enabled": False}
    assert settings["general"]["enableAutoUpdate"] is False
    assert not any(settings["memory"].values())
    assert settings["experimental"]["emitToolUseSummaries"] is False


def test_qwen_code_offers_the_tools_of_a_server_at_once() -> None:
    settings = settings_of(qwen(), launch_request(servers=(LAB,)))
    assert settings["tools"]["toolSearch"] == {"enabled": False}
    entry = {"command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}, "trust": True}
    assert settings["mcpServers"] == {"lab": entry | {"discoveryTimeoutMs": 60_000}}


def test_qwen_code_bounds_each_command_and_leaves_out_what_differs_between_workspaces() -> None:
    settings = settings_of(qwen(command_timeout_s=5), launch_request())
    assert settings["tools"]["shell"] == {"defaultTimeoutMs": 5000}
    assert settings["model"]["skipStartupContext"] is True


@pytest.mark.parametrize("instruction", ["-v", "@notes.txt is long", "/init"])
def test_an_instruction_that_qwen_code_would_take_for_an_option_a_file_or_a_command_is_none(instruction: str) -> None:
    assert qwen().launch_plan(launch_request(instruction)).argv[-2:] == ("-p", f" {instruction}")


@pytest.mark.parametrize(
    ("tools", "text", "role"),
    [
        (("list_agents", "edit"), "Do it.", CallRole.MAIN),
        (("agent", "edit"), "Say done.", CallRole.SUBAGENT),
        ((), "Now produce the <state_snapshot>.", CallRole.COMPACTION),
        ((), "What does this page say?", CallRole.SIDE),
    ],
)
def test_the_tools_of_qwen_code_say_what_a_call_is_for(tools: tuple[str, ...], text: str, role: CallRole) -> None:
    assert qwen().classify({}, asked(text, tools=tools)) == (role, {})
