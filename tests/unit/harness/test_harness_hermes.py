from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.harness.hermes import Hermes, HermesSettings
from clawhpc.records import CallRole, LaunchRequest
from tests.fakes.launch import LAB, URL, asked, launch_request

CACHE = Path("/cache/harness")


def hermes_config(asked_for: LaunchRequest, **settings: int | bool) -> dict[str, Any]:
    plan = Hermes(HermesSettings(**settings), CACHE).launch_plan(asked_for)  # type: ignore[arg-type]
    return json.loads(plan.files[".hermes/config.yaml"])


def test_hermes_is_told_a_window_that_it_starts_with() -> None:
    assert hermes_config(launch_request(context_window=2048))["model"] == {
        "provider": "custom",
        "base_url": f"{URL}/v1",
        "api_key": "sk-clawhpc",
        "default": "policy",
        "context_length": 64_000,
        "max_tokens": 256,
    }
    assert hermes_config(launch_request(context_window=100_000))["model"]["context_length"] == 100_000


def test_hermes_shows_all_its_tools_and_those_of_slow_servers_from_its_first_call() -> None:
    config = hermes_config(launch_request(servers=(LAB,)))
    entry = {"command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}, "connect_timeout": 60}
    assert config["mcp_servers"] == {"lab": entry}
    assert config["mcp_discovery_timeout"] == 60
    assert config["tools"] == {"tool_search": {"enabled": "off"}}


def test_hermes_does_nothing_that_was_not_asked_for() -> None:
    config = hermes_config(launch_request(), max_retries=4)
    assert config["agent"]["api_max_retries"] == 5
    assert not config["compression"]["enabled"]
    assert not config["auxiliary"]["title_generation"]["enabled"]
    assert config["memory"] == {"nudge_interval": 0}
    assert config["skills"] == {"creation_nudge_interval": 0}
    assert not config["lsp"]["enabled"]
    assert not config["model_catalog"]["enabled"]
    assert not config["security"]["allow_lazy_installs"]


def test_an_instruction_that_hermes_would_take_for_an_option_is_none() -> None:
    argv = Hermes(HermesSettings(), CACHE).launch_plan(launch_request("--version")).argv
    assert argv[-2:] == ("--oneshot", " --version")


@pytest.mark.parametrize(
    ("tools", "role"),
    [
        (("terminal", "delegate_task"), CallRole.MAIN),
        (("terminal",), CallRole.SUBAGENT),
        ((), CallRole.COMPACTION),
    ],
)
def test_the_tools_of_hermes_say_what_a_call_is_for(tools: tuple[str, ...], role: CallRole) -> None:
    assert Hermes(HermesSettings(), CACHE).classify({"user-agent": "x"}, asked("Do it.", tools=tools)) == (role, {})
