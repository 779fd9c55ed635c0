from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.errors import UserError
from clawhpc.harness.base import Harness, check_mcp
from clawhpc.harness.claude_code import ClaudeCodeSettings
from clawhpc.harness.pi import PiSettings
from clawhpc.harness.registry import ADAPTERS, make_harness
from clawhpc.records import CallRole, LaunchPlan, TaskSpec
from tests.fakes.launch import LAB, asked, launch, launch_request
from tests.fakes.records import script_verifier

EVERY = pytest.mark.parametrize("name", ADAPTERS)
INSTALLED = pytest.mark.parametrize("name", [name for name in ADAPTERS if name != "whitebox"])
"""The one of ours comes with the package."""
URLS = ("http://127.0.0.1:8377/s/a", "http://127.0.0.1:8377/s/b")
MAIN_TOOLS = ("Bash", "list_agents", "delegate_task", "spawn")
"""Those by which some know their main loop, and another."""


def harness(name: str, root: Path = Path("/cache/harness")) -> Harness:
    return make_harness(name, ADAPTERS[name].settings_type(), root)


@EVERY
def test_the_program_starts_from_the_read_only_install_and_gets_the_instruction_last(name: str) -> None:
    plan = launch(harness(name))
    (host, inside), *others = plan.read_only.items()
    assert not others
    assert host == str(harness(name).install_dir)
    program = plan.argv[2] if plan.argv[1] == "-IS" else plan.argv[0]
    assert program.startswith(f"{inside}/")
    assert " ".join(plan.argv).endswith(" Do it.")


@pytest.mark.parametrize("name", ["whitebox", "hermes", "nanobot", "mini_swe_agent"])
def test_a_harness_in_python_starts_in_the_one_that_its_image_has(name: str) -> None:
    plan = harness(name).launch_plan(launch_request(python="/usr/local/bin/python3"))
    assert plan.argv[:2] == ("/usr/local/bin/python3", "-IS")


@EVERY
def test_the_plan_is_the_same_for_every_rollout_but_for_the_url(name: str) -> None:
    first, second = (harness(name).launch_plan(launch_request(url=url, servers=(LAB,))) for url in URLS)
    assert first != second
    assert without(URLS[0], first) == without(URLS[1], second)


def without(url: str, plan: LaunchPlan) -> LaunchPlan:
    return replace(
        plan,
        argv=tuple(word.replace(url, "URL") for word in plan.argv),
        env={key: value.replace(url, "URL") for key, value in plan.env.items()},
        files={path: text.replace(url, "URL") for path, text in plan.files.items()},
    )


@EVERY
def test_every_harness_speaks_utf_8(name: str) -> None:
    assert launch(harness(name)).env["LANG"] == "C.UTF-8"


@INSTALLED
def test_a_missing_program_is_a_user_error_that_names_it_and_the_remedy(name: str, tmp_path: Path) -> None:
    root = tmp_path / "cache" / "harness"
    with pytest.raises(UserError, match=f"no program {harness(name, root).install_dir}/") as caught:
        harness(name, root).check_install()
    script, *arguments = str(caught.value).partition("; run: ")[2].split()
    assert Path(script).is_file()
    assert os.access(script, os.X_OK)
    assert arguments == [name, f"{tmp_path}/cache"]


@INSTALLED
def test_all_that_is_started_must_be_there(name: str, tmp_path: Path) -> None:
    made = harness(name, tmp_path)
    started = [word.removeprefix("/harness/") for word in launch(made).argv if word.startswith("/harness/")]
    for index, word in enumerate(started):
        with pytest.raises(UserError, match=f"no program {made.install_dir / word};"):
            made.check_install()
        program = made.install_dir / word
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch(mode=0o644 if index else 0o755)
    made.check_install()


@EVERY
def test_a_call_with_tools_is_the_main_loop(name: str) -> None:
    conversation = asked("Do it.", tools=MAIN_TOOLS)
    assert harness(name).classify({"user-agent": "x"}, conversation) == (CallRole.MAIN, {})


HEADERS = (
    "anthropic-beta",
    "thread-id",
    "x-claude-code-agent-id",
    "x-codex-turn-metadata",
    "x-openai-subagent",
    "x-parent-session-id",
    "x-session-id",
)
NASTY = ("", "[" * 5000, '{"request_kind":' * 5000, '{"request_kind": [1]}', "NaN", "9" * 5000, "\0", "\ud800", '"')


@EVERY
@given(headers=st.dictionaries(st.sampled_from(HEADERS), st.sampled_from(NASTY) | st.text()), tools=st.booleans())
def test_no_header_that_the_policy_may_send_stops_a_rollout(name: str, headers: dict[str, str], tools: bool) -> None:
    _, kept = harness(name).classify(headers, asked("Do it.", tools=MAIN_TOOLS if tools else ()))
    assert kept.keys() <= headers.keys()


@EVERY
@pytest.mark.parametrize("text", NASTY)
def test_nor_does_one_that_is_made_to(name: str, text: str) -> None:
    harness(name).classify(dict.fromkeys(HEADERS, text), asked())
    for header in HEADERS:
        harness(name).classify({header: text}, asked("Do it.", tools=MAIN_TOOLS))


def test_an_unknown_harness_and_foreign_settings_are_user_errors() -> None:
    with pytest.raises(UserError, match="harness=hal: allowed are claude_code, openclaw"):
        make_harness("hal", PiSettings(), Path("/cache"))
    with pytest.raises(UserError, match="harness pi takes PiSettings, not ClaudeCodeSettings"):
        make_harness("pi", ClaudeCodeSettings(), Path("/cache"))


@EVERY
def test_a_task_with_servers_is_refused_by_name_where_the_harness_has_no_mcp_and_else_mounted(name: str) -> None:
    adapter, plain = (
        ADAPTERS[name],
        TaskSpec(task_id="t", instruction="", input_dir=None, verifier=script_verifier("/r")),
    )
    check_mcp(adapter, (plain,))
    if adapter.mounts_mcp:
        check_mcp(adapter, (replace(plain, mcp_servers=(LAB,)),))
        plan = launch(harness(name), servers=(LAB,))
        mounted = (*plan.argv, *plan.files.values())
        assert all(any(word in text for text in mounted) for word in ("lab", *LAB.argv, *LAB.env))
    else:
        with pytest.raises(UserError, match=f"harness {name} has no MCP, but task t has servers: lab"):
            check_mcp(adapter, (plain, replace(plain, mcp_servers=(LAB,))))
