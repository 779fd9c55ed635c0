from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.harness.openclaw import FEW_TOOLS, OpenClaw, OpenClawSettings
from clawhpc.records import WORKSPACE_MOUNT, CallRole, LaunchRequest
from tests.fakes.launch import LAB, URL, asked, launch_request


def openclaw(**settings: bool) -> OpenClaw:
    return OpenClaw(OpenClawSettings(**settings), Path("/cache/harness"))


def config_of(harness: OpenClaw, request: LaunchRequest) -> dict[str, Any]:
    return json.loads(harness.launch_plan(request).files[".openclaw/openclaw.json"])


def test_openclaw_finds_the_proxy_and_knows_the_limits_of_the_model() -> None:
    config = config_of(openclaw(), launch_request(context_window=9000))
    provider = config["models"]["providers"]["proxy"]
    assert (provider["baseUrl"], provider["api"]) == (f"{URL}/v1", "openai-completions")
    assert provider["models"] == [{"id": "policy", "name": "policy", "contextWindow": 9000, "maxTokens": 256}]
    assert config["agents"]["defaults"]["model"] == {"primary": "proxy/policy"}


def test_openclaw_is_told_a_window_that_it_starts_with() -> None:
    (model,) = config_of(openclaw(), launch_request(context_window=2048))["models"]["providers"]["proxy"]["models"]
    assert model["contextWindow"] == 4000


def test_openclaw_leaves_the_workspace_as_it_is_and_gives_every_rollout_the_same_session() -> None:
    defaults = config_of(openclaw(), launch_request())["agents"]["defaults"]
    assert (defaults["workspace"], defaults["skipBootstrap"]) == (WORKSPACE_MOUNT, True)
    argv = openclaw().launch_plan(launch_request()).argv
    assert argv[argv.index("--session-id") + 1] == "rollout"


def test_openclaw_starts_once_with_what_was_compiled_before() -> None:
    env = openclaw().launch_plan(launch_request()).env
    assert env["OPENCLAW_NO_RESPAWN"] == env["OPENCLAW_PACKAGED_COMPILE_CACHE_RESPAWNED"] == "1"
    assert (env["NODE_COMPILE_CACHE"], env["NODE_COMPILE_CACHE_PORTABLE"]) == ("/harness/compile-cache", "1")


def test_the_few_tools_of_openclaw_are_those_of_a_server_too() -> None:
    bare, full = (config_of(openclaw(bare=bare), launch_request(servers=(LAB,))) for bare in (True, False))
    assert bare["tools"] == {"toolSearch": False, "allow": [*FEW_TOOLS, "lab__*"]}
    assert full["tools"] == {"toolSearch": False}
    entry = {"command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}, "connectionTimeoutMs": 60_000}
    assert bare["mcp"]["servers"] == {"lab": entry}


@pytest.mark.parametrize("instruction", ["-v", "/new"])
def test_an_instruction_that_openclaw_would_take_for_an_option_or_a_command_is_none(instruction: str) -> None:
    assert openclaw().launch_plan(launch_request(instruction)).argv[-2:] == ("--message", f" {instruction}")


@pytest.mark.parametrize("compact", [True, False])
def test_openclaw_compacts_early_only_where_it_may(compact: bool) -> None:
    defaults = config_of(openclaw(compact=compact), launch_request())["agents"]["defaults"]
    assert defaults["compaction"] == {"enabled": compact}


def test_the_calls_of_openclaw_without_tools_are_not_its_main_loop() -> None:
    assert openclaw().classify({}, asked("Do it.", tools=("exec",))) == (CallRole.MAIN, {})
    assert openclaw().classify({}, asked("<conversation>\n[User]: Do it.")) == (CallRole.COMPACTION, {})
    assert openclaw().classify({}, asked("What was it?")) == (CallRole.SIDE, {})
