from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.harness.codex import Codex, CodexSettings, toml_table
from clawhpc.records import CallRole, LaunchRequest
from tests.fakes.launch import LAB, URL, asked, launch_request

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def codex(**settings: Any) -> Codex:
    return Codex(CodexSettings(**settings), Path("/cache/harness"))


def config_of(harness: Codex, request: LaunchRequest) -> dict[str, Any]:
    return tomllib.loads(harness.launch_plan(request).files[".codex/config.toml"])


def test_codex_finds_the_proxy_and_does_not_try_for_long() -> None:
    config = config_of(codex(max_retries=1), launch_request())
    provider = config["model_providers"][config["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{URL}/v1", "responses")
    assert (provider["request_max_retries"], provider["stream_max_retries"]) == (1, 1)
    assert provider["env_key"] in codex().launch_plan(launch_request()).env
    assert config["model"] == "policy"


def test_codex_is_kept_from_the_outside_and_from_asking() -> None:
    config = config_of(codex(), launch_request())
    assert (config["check_for_update_on_startup"], config["web_search"]) == (False, "disabled")
    assert config["analytics"] == config["feedback"] == {"enabled": False}
    assert config["otel"] == {"exporter": "none"}
    argv = codex().launch_plan(launch_request("--help")).argv
    assert "--dangerously-bypass-approvals-and-sandbox" in argv
    assert argv[-2:] == ("--", "--help")


def test_codex_is_told_the_window_only_where_it_may_compact() -> None:
    assert config_of(codex(compact=True), launch_request())["model_context_window"] == 2048
    assert "model_context_window" not in config_of(codex(), launch_request())


def test_codex_waits_for_the_servers_of_a_task() -> None:
    assert config_of(codex(), launch_request(servers=(LAB,)))["mcp_servers"] == {
        "lab": {
            "command": "python3",
            "args": ["/mcp/server.py"],
            "env": {"ROUNDS": "3"},
            "required": True,
            "startup_timeout_sec": 60,
        }
    }


TURN = "x-codex-turn-metadata"
SUBAGENT = {"x-openai-subagent": "collab_spawn", "thread-id": "2"}
COMPACTION = {TURN: json.dumps({"request_kind": "compaction", "turn_started_at_unix_ms": 5})}


@pytest.mark.parametrize(
    ("headers", "tools", "expected"),
    [
        ({TURN: '{"request_kind":"turn"}'}, ("exec_command",), (CallRole.MAIN, {})),
        (SUBAGENT, ("exec_command",), (CallRole.SUBAGENT, SUBAGENT)),
        (COMPACTION | {"thread-id": "1"}, (), (CallRole.COMPACTION, {TURN: "compaction"})),
        ({TURN: "no JSON"}, (), (CallRole.SIDE, {})),
        ({TURN: "[]"}, ("exec_command",), (CallRole.MAIN, {})),
    ],
)
def test_the_headers_of_codex_say_what_a_call_is_for(
    headers: dict[str, str], tools: tuple[str, ...], expected: tuple[CallRole, dict[str, str]]
) -> None:
    assert codex().classify(headers, asked("Do it.", tools=tools)) == expected


@given(table=st.dictionaries(TEXT, VALUES, max_size=4))
def test_what_is_written_as_toml_is_read_as_it_was(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml_table(table)) == table
