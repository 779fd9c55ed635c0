from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.harness.gemini_cli import GeminiCli, GeminiCliSettings
from clawhpc.records import CallRole, LaunchRequest
from tests.fakes.launch import LAB, URL, asked, launch_request


def gemini(**settings: int) -> GeminiCli:
    return GeminiCli(GeminiCliSettings(**settings), Path("/cache/harness"))


def settings_of(harness: GeminiCli, request: LaunchRequest) -> dict[str, Any]:
    return json.loads(harness.launch_plan(request).files[".gemini/settings.json"])


def test_gemini_cli_finds_the_proxy_and_knows_what_a_reply_may_have() -> None:
    assert gemini().launch_plan(launch_request()).env["GOOGLE_GEMINI_BASE_URL"] == URL
    (override,) = settings_of(gemini(), launch_request())["modelConfigs"]["customOverrides"]
    assert override["match"] == {"model": "policy"}
    assert override["modelConfig"]["generateContentConfig"] == {"maxOutputTokens": 256}


def test_gemini_cli_is_kept_from_the_outside_and_makes_no_calls_of_its_own() -> None:
    settings = settings_of(gemini(), launch_request())
    assert settings["privacy"] == {"usageStatisticsEnabled": False}
    assert settings["telemetry"] == {"enabled": False}
    assert settings["general"]["enableAutoUpdate"] is False
    assert settings["model"] == {"skipNextSpeakerCheck": True, "disableLoopDetection": True}


def test_bare_gemini_cli_has_three_tools_and_no_prompt_to_speak_of_and_full_has_what_works_offline() -> None:
    bare, full = settings_of(gemini(), launch_request()), settings_of(gemini(bare=False), launch_request())
    assert bare["tools"]["core"] == ["read_file", "write_file", "run_shell_command", "mcp_*"]
    assert "core" not in full["tools"]
    assert full["tools"]["exclude"] == ["google_web_search", "web_fetch"]
    assert gemini().launch_plan(launch_request()).env["GEMINI_PROMPT_COREMANDATES"] == "0"
    assert "GEMINI_PROMPT_COREMANDATES" not in gemini(bare=False).launch_plan(launch_request()).env
    assert bare["experimental"] == {"enableAgents": False}
    assert "experimental" not in full


def test_gemini_cli_offers_the_tools_of_a_server_at_once() -> None:
    settings = settings_of(gemini(), launch_request(servers=(LAB,)))
    assert settings["mcpServers"] == {
        "lab": {"command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}, "trust": True}
    }


def test_gemini_cli_bounds_retries_and_silent_commands() -> None:
    settings = settings_of(gemini(max_retries=1, silence_timeout_s=5), launch_request())
    assert settings["general"]["maxAttempts"] == 2
    assert settings["tools"]["shell"] == {"enableInteractiveShell": False, "inactivityTimeout": 5}


@pytest.mark.parametrize("instruction", ["-v", "@notes.txt is long", "/init"])
def test_an_instruction_that_gemini_cli_would_take_for_an_option_a_file_or_a_command_is_none(instruction: str) -> None:
    assert gemini().launch_plan(launch_request(instruction)).argv[-2:] == ("-p", f" {instruction}")


@pytest.mark.parametrize(
    ("tools", "text", "role"),
    [
        (("run_shell_command",), "Do it.", CallRole.MAIN),
        (("run_shell_command", "complete_task"), "Say done.", CallRole.SUBAGENT),
        ((), "Then, generate the updated <state_snapshot>.", CallRole.COMPACTION),
        ((), "Who speaks next?", CallRole.SIDE),
    ],
)
def test_the_tools_of_gemini_cli_say_what_a_call_is_for(tools: tuple[str, ...], text: str, role: CallRole) -> None:
    assert gemini().classify({}, asked(text, tools=tools)) == (role, {})
