"""The adapters of harnesses that come from pip: mini-swe-agent, Hermes, nanobot."""

import json
from pathlib import Path
from typing import Any

import pytest

from clawhpc.harness.hermes import Hermes, HermesSettings
from clawhpc.harness.mini_swe_agent import MiniSweAgent, MiniSweAgentSettings
from clawhpc.harness.nanobot import Nanobot, NanobotSettings
from clawhpc.records import WORKSPACE_MOUNT, CallRole, Conversation, LaunchRequest, McpServer, Message, Tool

CACHE = Path("/cache/harness")
TOOL = Tool(name="bash", description="", parameters={})


def request(instruction: str = "Do it.", window: int = 2048, servers: tuple[McpServer, ...] = ()) -> LaunchRequest:
    return LaunchRequest(
        instruction=instruction,
        base_url="http://127.0.0.1:8377/s/token",
        workspace_mount=WORKSPACE_MOUNT,
        model="policy",
        context_window=window,
        max_output_tokens=256,
        mcp_servers=servers,
    )


def asked(*texts: str, tools: tuple[Tool, ...] = (TOOL,)) -> Conversation:
    """A system prompt, and user messages after it."""
    roles = ("system", *("user" for _ in texts[1:]))
    messages = tuple(Message(role=role, text=text) for role, text in zip(roles, texts, strict=True))  # type: ignore[arg-type]
    return Conversation(model="policy", messages=messages, tools=tools)


# ---------------------------------------------------------------------------------------------------------------------
# mini-swe-agent
# ---------------------------------------------------------------------------------------------------------------------


def test_mini_reaches_the_proxy_and_nobody_else_and_asks_no_person() -> None:
    launch = MiniSweAgent(MiniSweAgentSettings(), CACHE).launch_plan(request())
    assert launch.env["OPENAI_API_BASE"] == "http://127.0.0.1:8377/s/token/v1"
    assert launch.env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert launch.files == {}
    assert {"--yolo", "--exit-immediately", "openai/policy"} <= set(launch.argv)


def test_mini_keeps_its_own_prompts_and_gets_its_limits_beside_them() -> None:
    settings = MiniSweAgentSettings(max_retries=5, bash_timeout_s=7)
    argv = MiniSweAgent(settings, CACHE).launch_plan(request()).argv
    chosen = [argv[index + 1] for index, word in enumerate(argv) if word == "--config"]
    assert chosen == [
        "mini.yaml",
        "model.model_kwargs.max_tokens=256",
        "model.model_kwargs.max_retries=5",
        "environment.timeout=7",
    ]


def test_every_call_of_mini_is_its_main_loop() -> None:
    assert MiniSweAgent(MiniSweAgentSettings(), CACHE).classify({}, asked("s", "u", tools=())) == (CallRole.MAIN, {})


# ---------------------------------------------------------------------------------------------------------------------
# Hermes
# ---------------------------------------------------------------------------------------------------------------------


def hermes_config(asked_for: LaunchRequest, **settings: int | bool) -> dict[str, Any]:
    launch = Hermes(HermesSettings(**settings), CACHE).launch_plan(asked_for)  # type: ignore[arg-type]
    return json.loads(launch.files[".hermes/config.yaml"])


def test_hermes_is_told_a_window_that_it_starts_with() -> None:
    assert hermes_config(request(window=2048))["model"] == {
        "provider": "custom",
        "base_url": "http://127.0.0.1:8377/s/token/v1",
        "api_key": "sk-clawhpc",
        "default": "policy",
        "context_length": 64_000,
        "max_tokens": 256,
    }
    assert hermes_config(request(window=100_000))["model"]["context_length"] == 100_000


def test_hermes_shows_all_its_tools_and_those_of_slow_servers_from_its_first_call() -> None:
    lab = McpServer(name="lab", argv=("python3", "/mcp/server.py"), env={"ROUNDS": "3"})
    config = hermes_config(request(servers=(lab,)))
    assert config["mcp_servers"] == {"lab": {"command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}}}
    assert config["mcp_discovery_timeout"] == 60
    assert config["tools"] == {"tool_search": {"enabled": "off"}}


def test_hermes_does_nothing_that_was_not_asked_for() -> None:
    config = hermes_config(request(), max_retries=4)
    assert config["agent"]["api_max_retries"] == 5
    assert not config["compression"]["enabled"]
    assert not config["auxiliary"]["title_generation"]["enabled"]
    assert config["memory"] == {"nudge_interval": 0}
    assert config["skills"] == {"creation_nudge_interval": 0}
    assert not config["lsp"]["enabled"]
    assert not config["model_catalog"]["enabled"]
    assert not config["security"]["allow_lazy_installs"]


def test_an_instruction_that_hermes_would_take_for_an_option_is_none() -> None:
    argv = Hermes(HermesSettings(), CACHE).launch_plan(request("--version")).argv
    assert argv[-2:] == ("--oneshot", " --version")


@pytest.mark.parametrize(
    ("conversation", "role"),
    [
        (asked("You are Hermes.", "Do it."), CallRole.MAIN),
        (asked("You are a focused subagent working on a specific delegated task.\n", "Do it."), CallRole.SUBAGENT),
        (asked("You are Hermes.", "You are a focused subagent working on a specific delegated task."), CallRole.MAIN),
        (asked("Summarise.", tools=()), CallRole.COMPACTION),
    ],
)
def test_hermes_says_in_its_prompt_what_a_call_is_for(conversation: Conversation, role: CallRole) -> None:
    assert Hermes(HermesSettings(), CACHE).classify({"user-agent": "x"}, conversation) == (role, {})


# ---------------------------------------------------------------------------------------------------------------------
# nanobot
# ---------------------------------------------------------------------------------------------------------------------


def nanobot_config(asked_for: LaunchRequest, **settings: int | bool) -> dict[str, Any]:
    launch = Nanobot(NanobotSettings(**settings), CACHE).launch_plan(asked_for)  # type: ignore[arg-type]
    return json.loads(launch.files[".nanobot/config.json"])


def test_nanobot_works_in_the_workspace_and_reaches_the_proxy() -> None:
    config = nanobot_config(request())
    assert config["providers"]["custom"]["apiBase"] == "http://127.0.0.1:8377/s/token/v1"
    defaults = config["agents"]["defaults"]
    assert (defaults["workspace"], defaults["model"], defaults["maxTokens"]) == (WORKSPACE_MOUNT, "policy", 256)


def test_nanobot_is_told_the_window_only_where_it_may_compact() -> None:
    windows = [
        nanobot_config(request(), compact=compact)["agents"]["defaults"]["contextWindowTokens"]
        for compact in (True, False)
    ]
    assert windows == [2048, 10_000_000]


def test_nanobot_mounts_the_servers_of_the_task() -> None:
    lab = McpServer(name="lab", argv=("python3", "/mcp/server.py"), env={"ROUNDS": "3"})
    servers = nanobot_config(request(servers=(lab,)))["tools"]["mcpServers"]
    assert servers == {
        "lab": {"type": "stdio", "command": "python3", "args": ["/mcp/server.py"], "env": {"ROUNDS": "3"}}
    }


@pytest.mark.parametrize(
    ("conversation", "role"),
    [
        (asked("## Runtime", "Do it."), CallRole.MAIN),
        (asked("# Subagent\n\nYou are a subagent.", "Do it."), CallRole.SUBAGENT),
        (asked("## Runtime", "# Subagent\n"), CallRole.MAIN),
        (asked("## Runtime", "Create a compact replacement checkpoint for this session.\n"), CallRole.COMPACTION),
        (asked("Judge it.", tools=()), CallRole.SIDE),
    ],
)
def test_nanobot_says_in_its_messages_what_a_call_is_for(conversation: Conversation, role: CallRole) -> None:
    assert Nanobot(NanobotSettings(), CACHE).classify({"user-agent": "x"}, conversation) == (role, {})
