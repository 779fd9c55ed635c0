from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.harness.nanobot import Nanobot, NanobotSettings
from clawhpc.records import WORKSPACE_MOUNT, CallRole, LaunchRequest
from tests.fakes.launch import LAB, URL, asked, launch_request

CACHE = Path("/cache/harness")


def nanobot_config(asked_for: LaunchRequest, **settings: int | bool) -> dict[str, Any]:
    plan = Nanobot(NanobotSettings(**settings), CACHE).launch_plan(asked_for)  # type: ignore[arg-type]
    return json.loads(plan.files[".nanobot/config.json"])


def test_nanobot_works_in_the_workspace_and_reaches_the_proxy() -> None:
    config = nanobot_config(launch_request())
    assert config["providers"]["custom"]["apiBase"] == f"{URL}/v1"
    defaults = config["agents"]["defaults"]
    assert (defaults["workspace"], defaults["model"], defaults["maxTokens"]) == (WORKSPACE_MOUNT, "policy", 256)


def test_nanobot_is_told_the_window_only_where_it_may_compact() -> None:
    windows = [
        nanobot_config(launch_request(), compact=compact)["agents"]["defaults"]["contextWindowTokens"]
        for compact in (True, False)
    ]
    assert windows == [2048, 10_000_000]


def test_nanobot_mounts_the_servers_of_the_task() -> None:
    servers = nanobot_config(launch_request(servers=(LAB,)))["tools"]["mcpServers"]
    assert servers == {
        "lab": {"type": "stdio", "command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}}
    }


@pytest.mark.parametrize(
    ("tools", "text", "role"),
    [
        (("exec", "spawn"), "Do it.", CallRole.MAIN),
        (("exec", "spawn"), "Do it:\nmake a replacement checkpoint.", CallRole.MAIN),
        (("exec",), "Do it.", CallRole.SUBAGENT),
        (("exec", "spawn"), "A replacement checkpoint, please.\n", CallRole.COMPACTION),
        ((), "Judge it.", CallRole.SIDE),
    ],
)
def test_nanobot_says_in_tools_and_last_message_what_a_call_is_for(
    tools: tuple[str, ...], text: str, role: CallRole
) -> None:
    assert Nanobot(NanobotSettings(), CACHE).classify({"user-agent": "x"}, asked(text, tools=tools)) == (role, {})
