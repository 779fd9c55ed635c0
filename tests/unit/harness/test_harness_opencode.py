from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.harness.opencode import Opencode, OpencodeSettings
from clawhpc.records import CallRole, LaunchRequest
from tests.fakes.launch import LAB, URL, asked, launch_request


def opencode(**settings: Any) -> Opencode:
    return Opencode(OpencodeSettings(**settings), Path("/cache/harness"))


def config_of(harness: Opencode, request: LaunchRequest) -> dict[str, Any]:
    return json.loads(harness.launch_plan(request).files[".config/opencode/opencode.json"])


def test_opencode_finds_the_proxy_and_knows_the_limits_of_the_model() -> None:
    config = config_of(opencode(), launch_request(context_window=9000))
    provider = config["provider"]["proxy"]
    assert provider["options"]["baseURL"] == f"{URL}/v1"
    assert provider["models"] == {"policy": {"name": "policy", "limit": {"context": 9000, "output": 256}}}
    argv = opencode().launch_plan(launch_request()).argv
    assert argv[argv.index("--model") + 1] == "proxy/policy"


def test_opencode_is_kept_from_the_outside_and_from_asking() -> None:
    plan = opencode().launch_plan(launch_request())
    config = config_of(opencode(), launch_request())
    assert (config["autoupdate"], config["share"], config["enabled_providers"]) == (False, "disabled", ["proxy"])
    assert {"--auto", "--pure", "--title"} <= set(plan.argv)
    switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    assert {plan.env[f"OPENCODE_DISABLE_{switch}"] for switch in switches} == {"1"}


@pytest.mark.parametrize("compact", [True, False])
def test_opencode_compacts_only_where_it_may(compact: bool) -> None:
    assert config_of(opencode(compact=compact), launch_request())["compaction"] == {"auto": compact, "prune": False}


def test_opencode_starts_the_servers_of_a_task_and_waits_for_them() -> None:
    assert config_of(opencode(), launch_request(servers=(LAB,)))["mcp"] == {
        "lab": {
            "type": "local",
            "timeout": 60_000,
            "command": ["python3", "/mcp/server.py"],
            "environment": {"ROUNDS": "3"},
        }
    }


def test_opencode_bounds_each_command() -> None:
    env = opencode(command_timeout_s=5).launch_plan(launch_request()).env
    assert env["OPENCODE_EXPERIMENTAL_BASH_DEFAULT_TIMEOUT_MS"] == "5000"


@pytest.mark.parametrize("instruction", ["Do it.", "--help me", "two  spaces\nand a line", "an end "])
def test_the_words_of_an_instruction_are_joined_by_opencode_as_they_were(instruction: str) -> None:
    argv = opencode().launch_plan(launch_request(instruction)).argv
    words = argv[argv.index("--") + 1 :]
    assert " ".join(words) == instruction
    assert not any(" " in word for word in words)


CHILD = {"x-parent-session-id": "ses_1", "x-session-id": "ses_2"}


@pytest.mark.parametrize(
    ("headers", "tools", "text", "expected"),
    [
        ({"x-session-id": "ses_1"}, ("bash",), "Do it.", (CallRole.MAIN, {})),
        (CHILD | {"x-other": "1"}, ("bash",), "Say done.", (CallRole.SUBAGENT, CHILD)),
        ({}, (), "<conversation>\n[User]: Do it.\n</conversation>", (CallRole.COMPACTION, {})),
        ({}, (), "What is this about?", (CallRole.SIDE, {})),
    ],
)
def test_opencode_says_what_a_call_is_for(
    headers: dict[str, str], tools: tuple[str, ...], text: str, expected: tuple[CallRole, dict[str, str]]
) -> None:
    assert opencode().classify(headers, asked(text, tools=tools)) == expected
