import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.harness.base import Harness, check_mcp
from clawhpc.harness.claude_code import ClaudeCode, ClaudeCodeSettings
from clawhpc.harness.pi import Pi, PiSettings
from clawhpc.harness.registry import ADAPTERS, make_harness
from clawhpc.records import (
    WORKSPACE_MOUNT,
    CallRole,
    Conversation,
    LaunchPlan,
    LaunchRequest,
    McpServer,
    TaskSpec,
    Tool,
)

BASE_URLS = {"ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE", "GOOGLE_GEMINI_BASE_URL"}
BOTH = pytest.mark.parametrize("name", ADAPTERS)
URL = "http://127.0.0.1:8377/s/token"
TOOL = Tool(name="Bash", description="", parameters={})
MAIN = Conversation(model="policy", messages=(), tools=(TOOL,))
MAIN_TOOLS = {"qwen_code": ("list_agents",)}
"""Those by which some know their main loop."""
LAB = McpServer(name="lab", argv=("python3", "/mcp/server.py"), env={"ROUNDS": "3"})
TEXT_ONLY = Conversation(model="policy", messages=())


def harness(name: str, root: Path = Path("/cache/harness")) -> Harness:
    return make_harness(name, ADAPTERS[name].settings_type(), root)


def request(instruction: str, url: str = URL, servers: tuple[McpServer, ...] = ()) -> LaunchRequest:
    return LaunchRequest(
        instruction=instruction,
        base_url=url,
        workspace_mount=WORKSPACE_MOUNT,
        model="policy",
        context_window=2048,
        max_output_tokens=256,
        mcp_servers=servers,
    )


def plan(harness: Harness, instruction: str = "Do it.") -> LaunchPlan:
    return harness.launch_plan(request(instruction))


@BOTH
def test_the_program_starts_from_the_read_only_install_and_gets_the_instruction_last(name: str) -> None:
    launch = plan(harness(name))
    (host, inside), *others = launch.read_only.items()
    assert not others
    assert host == str(harness(name).install_dir)
    assert launch.argv[0].startswith(f"{inside}/")
    assert " ".join(launch.argv).endswith(" Do it.")


@BOTH
def test_the_plan_is_the_same_for_every_rollout_but_for_url_and_instruction(name: str) -> None:
    first = harness(name).launch_plan(request("A", "http://127.0.0.1:8377/s/a"))
    second = harness(name).launch_plan(request("B", "http://127.0.0.1:8377/s/b"))
    assert first.argv[:-1] == second.argv[:-1]
    assert {key for key in first.env if first.env[key] != second.env[key]} <= BASE_URLS


@BOTH
def test_a_missing_program_is_a_user_error_that_names_it_and_the_remedy(name: str, tmp_path: Path) -> None:
    root = tmp_path / "cache" / "harness"
    with pytest.raises(UserError, match=f"no program {harness(name, root).install_dir}/") as caught:
        harness(name, root).check_install()
    script, *arguments = str(caught.value).partition("; run: ")[2].split()
    assert Path(script).is_file()
    assert os.access(script, os.X_OK)
    assert arguments == [name, f"{tmp_path}/cache"]


@BOTH
def test_a_program_that_is_there_is_enough(name: str, tmp_path: Path) -> None:
    made = harness(name, tmp_path)
    for word in plan(made).argv:
        if word.startswith("/harness/"):
            program = made.install_dir / Path(word).relative_to("/harness")
            program.parent.mkdir(parents=True, exist_ok=True)
            program.touch(mode=0o755)
    made.check_install()


@BOTH
def test_a_call_with_tools_is_the_main_loop(name: str) -> None:
    tools = (*MAIN.tools, *(Tool(name=tool, description="", parameters={}) for tool in MAIN_TOOLS.get(name, ())))
    assert harness(name).classify({"user-agent": "x"}, replace(MAIN, tools=tools)) == (CallRole.MAIN, {})


def test_an_unknown_harness_and_foreign_settings_are_user_errors() -> None:
    with pytest.raises(UserError, match="harness=hal: allowed are claude_code, openclaw"):
        make_harness("hal", PiSettings(), Path("/cache"))
    with pytest.raises(UserError, match="harness pi takes PiSettings, not ClaudeCodeSettings"):
        make_harness("pi", ClaudeCodeSettings(), Path("/cache"))


@BOTH
def test_a_task_with_servers_is_refused_by_name_where_the_harness_has_no_mcp_and_else_mounted(name: str) -> None:
    adapter, plain = ADAPTERS[name], TaskSpec(task_id="t", instruction="", input_dir=None, reward_dir="/r")
    check_mcp(adapter, (plain,))
    if adapter.mounts_mcp:
        check_mcp(adapter, (replace(plain, mcp_servers=(LAB,)),))
        launch = harness(name).launch_plan(request("Do it.", servers=(LAB,)))
        mounted = (*launch.argv, *launch.files.values())
        assert all(any(word in text for text in mounted) for word in ("lab", *LAB.argv, *LAB.env))
    else:
        with pytest.raises(UserError, match=f"harness {name} has no MCP, but task t declares servers: lab"):
            check_mcp(adapter, (plain, replace(plain, mcp_servers=(LAB,))))


# ---------------------------------------------------------------------------------------------------------------------
# Claude Code
# ---------------------------------------------------------------------------------------------------------------------


def claude(**settings: int | bool) -> ClaudeCode:
    return ClaudeCode(ClaudeCodeSettings(**settings), Path("/cache/harness"))  # type: ignore[arg-type]


def test_claude_code_is_kept_from_the_outside_and_from_rewriting_its_history() -> None:
    env = plan(claude()).env
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
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
    }.items() <= env.items()


def test_claude_code_asks_the_policy_for_everything_whatever_tier_it_wants() -> None:
    env = plan(claude()).env
    tiers = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    assert {env[tier] for tier in tiers} == {"policy"}


def test_the_full_mode_of_claude_code_is_a_flag_less() -> None:
    bare, full = plan(claude()).argv, plan(claude(bare=False)).argv
    assert tuple(word for word in bare if word != "--bare") == full
    assert "--bare" in bare


def test_claude_code_is_told_the_window_only_where_it_may_compact() -> None:
    told, untold = plan(claude(compact=True)).env, plan(claude()).env
    assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "2048"
    assert "DISABLE_COMPACT" not in told
    assert untold["DISABLE_COMPACT"] == "1"
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in untold


def test_claude_code_mounts_the_servers_of_the_task_and_no_others() -> None:
    argv = claude().launch_plan(request("Do it.", servers=(LAB,))).argv
    entry = {"type": "stdio", "command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}}
    assert json.loads(argv[argv.index("--mcp-config") + 1]) == {"mcpServers": {"lab": entry}}
    assert argv[-3:] == ("--strict-mcp-config", "--", "Do it.")


def test_claude_code_bounds_each_command() -> None:
    env = plan(claude(bash_timeout_s=5)).env
    assert env["BASH_DEFAULT_TIMEOUT_MS"] == env["BASH_MAX_TIMEOUT_MS"] == "5000"


def test_an_instruction_that_looks_like_an_option_or_a_command_of_claude_code_is_none() -> None:
    assert plan(claude(), "--version").argv[-2:] == ("--", "--version")
    assert plan(claude(), "/init").argv[-2:] == ("--", " /init")


@pytest.mark.parametrize(
    ("headers", "conversation", "role", "kept"),
    [
        ({"x-claude-code-agent-id": "a1"}, MAIN, CallRole.SUBAGENT, {"x-claude-code-agent-id": "a1"}),
        (
            {"anthropic-beta": "x,fallback-credit-2026-06-01"},
            MAIN,
            CallRole.COMPACTION,
            {"anthropic-beta": "x,fallback-credit-2026-06-01"},
        ),
        ({"anthropic-beta": "x", "x-api-key": "k"}, MAIN, CallRole.MAIN, {}),
        ({}, TEXT_ONLY, CallRole.SIDE, {}),
    ],
)
def test_claude_code_says_in_its_headers_what_a_call_is_for(
    headers: dict[str, str], conversation: Conversation, role: CallRole, kept: dict[str, str]
) -> None:
    assert claude().classify(headers, conversation) == (role, kept)


# ---------------------------------------------------------------------------------------------------------------------
# Pi
# ---------------------------------------------------------------------------------------------------------------------


def pi(**settings: bool) -> Pi:
    return Pi(PiSettings(**settings), Path("/cache/harness"))


def test_pi_finds_the_proxy_and_the_model_in_its_files() -> None:
    launch = plan(pi())
    provider = json.loads(launch.files[".pi/agent/models.json"])["providers"]["proxy"]
    assert provider["baseUrl"] == f"{URL}/v1"
    assert provider["api"] == "openai-completions"
    assert provider["models"] == [{"id": "policy", "contextWindow": 2048, "maxTokens": 256}]
    assert launch.argv[launch.argv.index("--provider") + 1] == "proxy"
    assert launch.argv[launch.argv.index("--model") + 1] == "policy"


def test_pi_contacts_nobody_else() -> None:
    assert plan(pi()).env == {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}


@pytest.mark.parametrize("compact", [True, False])
def test_pi_compacts_only_where_it_may(compact: bool) -> None:
    settings = json.loads(plan(pi(compact=compact)).files[".pi/agent/settings.json"])
    assert settings == {"compaction": {"enabled": compact}}


@pytest.mark.parametrize("instruction", ["-v", "--version", "@notes.txt is long", "- one\n- two", "/new"])
def test_an_instruction_that_pi_would_take_for_an_option_or_a_file_is_none(instruction: str) -> None:
    assert plan(pi(), instruction).argv[-2:] == ("-p", f" {instruction}")


def test_the_call_without_tools_is_the_compaction_of_pi() -> None:
    assert pi().classify({}, TEXT_ONLY) == (CallRole.COMPACTION, {})
