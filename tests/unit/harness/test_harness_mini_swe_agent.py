from __future__ import annotations

from pathlib import Path

from clawhpc.harness.mini_swe_agent import MiniSweAgent, MiniSweAgentSettings
from clawhpc.records import CallRole
from tests.fakes.launch import URL, asked, launch_request

CACHE = Path("/cache/harness")


def test_mini_reaches_the_proxy_and_nobody_else_and_asks_no_person() -> None:
    plan = MiniSweAgent(MiniSweAgentSettings(), CACHE).launch_plan(launch_request())
    assert plan.env["OPENAI_API_BASE"] == f"{URL}/v1"
    assert plan.env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert plan.files == {}
    assert {"--yolo", "--exit-immediately", "openai/policy"} <= set(plan.argv)


def test_mini_keeps_its_own_prompts_and_gets_its_limits_beside_them() -> None:
    settings = MiniSweAgentSettings(max_retries=5, command_timeout_s=7)
    argv = MiniSweAgent(settings, CACHE).launch_plan(launch_request()).argv
    chosen = [argv[index + 1] for index, word in enumerate(argv) if word == "--config"]
    assert chosen == [
        "mini.yaml",
        "model.model_kwargs.max_tokens=256",
        "model.model_kwargs.max_retries=5",
        "environment.timeout=7",
    ]


def test_every_call_of_mini_is_its_main_loop() -> None:
    assert MiniSweAgent(MiniSweAgentSettings(), CACHE).classify({}, asked("Do it.")) == (CallRole.MAIN, {})
