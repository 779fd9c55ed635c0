"""Each pinned harness, real and unmodified in a real sandbox, behind the real proxy, with the oracle for a model.

When a pin moves, these tests say what has changed.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import anyio
import pytest

from clawhpc.errors import UserError
from clawhpc.harness.base import Harness, HarnessSettings
from clawhpc.harness.claude_code import ClaudeCodeSettings
from clawhpc.harness.codex import CodexSettings
from clawhpc.harness.gemini_cli import GeminiCliSettings
from clawhpc.harness.hermes import HermesSettings
from clawhpc.harness.mini_swe_agent import MiniSweAgentSettings
from clawhpc.harness.nanobot import NanobotSettings
from clawhpc.harness.openclaw import OpenClawSettings
from clawhpc.harness.opencode import OpencodeSettings
from clawhpc.harness.pi import PiSettings
from clawhpc.harness.qwen_code import QwenCodeSettings
from clawhpc.harness.registry import make_harness
from clawhpc.ledger import Ledger
from clawhpc.proxy.respond import Prompt, ScriptedResponder
from clawhpc.records import (
    MCP_MOUNT,
    CallRole,
    Conversation,
    GroupKey,
    GroupPlan,
    Limits,
    McpServer,
    Outcome,
    Reply,
    RolloutRecord,
    TaskSpec,
    ToolCall,
)
from clawhpc.rollout import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.base import Sandbox
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.families import FAMILIES, ShellStep, draw_task
from clawhpc.tasks.generate import write_task
from clawhpc.tasks.oracle import carry_over, oracle_reply, shell_call, task_solution
from clawhpc.wire.base import ContextOverflow
from clawhpc.wire.canonical import canonical_arguments
from tests.sandbox_parts import missing, working_sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.harness, pytest.mark.sandbox]

FULL = ClaudeCodeSettings(bare=False)
NO_COMPACTION = [
    pytest.param("claude_code", ClaudeCodeSettings(), id="claude_code bare"),
    pytest.param("claude_code", FULL, id="claude_code full", marks=pytest.mark.slow),
    pytest.param("openclaw", OpenClawSettings(), id="openclaw bare", marks=pytest.mark.slow),
    pytest.param("codex", CodexSettings(), id="codex"),
    pytest.param("pi", PiSettings(), id="pi"),
    pytest.param("opencode", OpencodeSettings(), id="opencode"),
    pytest.param("mini_swe_agent", MiniSweAgentSettings(), id="mini_swe_agent"),
    pytest.param("nanobot", NanobotSettings(), id="nanobot"),
    pytest.param("gemini_cli", GeminiCliSettings(), id="gemini_cli bare"),
]
ALWAYS_COMPACTION = [pytest.param("qwen_code", QwenCodeSettings(), id="qwen_code")]
NO_EXIT_CODE = [pytest.param("hermes", HermesSettings(), id="hermes")]
"""Answers that the window is full, and ends as if all were well."""
EVERY_HARNESS = pytest.mark.parametrize(("name", "settings"), [*NO_COMPACTION, *ALWAYS_COMPACTION, *NO_EXIT_CODE])
NUM_AT_ONCE = 3
"""Rollouts of one test: harnesses take seconds of CPU time to start, and each has its own deadline."""
MCP_SERVER = Path(__file__).parents[1] / "fakes" / "mcp_server.py"
SUMMARY = "<summary>Nothing is done yet.</summary>"

Script = Callable[[Conversation], Reply]


@dataclass
class Recorder:
    """A model that answers from a script, and keeps what it was asked."""

    script: Script
    asked: list[Conversation] = field(default_factory=list)

    def __call__(self, conversation: Conversation) -> Reply:
        self.asked.append(conversation)
        return self.script(conversation)


@dataclass(frozen=True)
class Bench:
    """Runs a harness on a task with a script for a model."""

    sandbox: Sandbox
    cache_dir: Path
    scratch: Path

    def harness(self, name: str, settings: HarnessSettings) -> Harness:
        harness = make_harness(name, settings, self.cache_dir / "harness")
        try:
            harness.check_install()
        except UserError as error:
            missing(str(error))
        return harness

    async def run(self, harness: Harness, task: TaskSpec, responder: ScriptedResponder) -> RolloutRecord:
        key = GroupKey(phase="capture", step=0, task_id=task.task_id, harness=harness.name)
        parts = RolloutParts(
            sandbox=self.sandbox,
            harness=harness,
            responder=responder,
            scratch=self.scratch,
            limits=Limits(deadline_s=120.0, reserve_s=15.0),
            model="policy",
            context_window=32_000,
            max_output_tokens=256,
            worker_id="test",
            now=time.time,
        )
        group = GroupPlan(key=key, task=task, num_samples=1, seed=0)
        return await run_rollout(RolloutPlan(group=group, sample=0, temperature=1.0), parts)


@pytest.fixture
async def bench(ledger: Ledger, cache_dir: Path) -> Bench:
    sandbox = await working_sandbox(SandboxSettings(kind="bubblewrap"), ledger, cache_dir)
    return Bench(sandbox, cache_dir, ledger.scratch)


def lay_tasks(folder: Path, family: str, num_tasks: int) -> tuple[TaskSpec, ...]:
    """Different tasks of one family, as ClawGym folders."""
    chance = random.Random(family)
    for index in range(num_tasks):
        write_task(draw_task(family, chance, "train"), f"{family}-{index}", folder)
    return load_tasks(folder).tasks


VOLATILE = re.compile(r"^\[\w+ [-\d]+ [:\d]+ UTC\]|^Chunk ID: \w+\nWall time: [.\d]+ seconds")
"""What OpenClaw and Codex say of the time."""


def comparable(conversation: Conversation) -> Conversation:
    """Without the time, and the ids of tool calls, which no training token depends on."""
    messages = (
        replace(
            message,
            text=VOLATILE.sub("", message.text),
            tool_call_id="",
            tool_calls=tuple(
                ToolCall(id="", name=call.name, arguments=canonical_arguments(call.arguments))
                for call in message.tool_calls
            ),
        )
        for message in conversation.messages
    )
    return replace(conversation, messages=tuple(messages))


# ---------------------------------------------------------------------------------------------------------------------
# The oracle solves every family in every harness, and its conversations carry over
# ---------------------------------------------------------------------------------------------------------------------


@EVERY_HARNESS
async def test_the_oracle_solves_every_family_and_a_conversation_carries_over_to_the_next_task(
    bench: Bench, tmp_path: Path, name: str, settings: HarnessSettings
) -> None:
    harness = bench.harness(name, settings)
    last: dict[str, Conversation] = {}

    at_once = anyio.CapacityLimiter(NUM_AT_ONCE)

    async def solve(task: TaskSpec) -> None:
        recorder = Recorder(partial(oracle_reply, task_solution(task)))
        async with at_once:
            record = await bench.run(harness, task, ScriptedResponder(script=recorder))
        check_solved(task, harness, record)
        last[task.task_id] = recorder.asked[-1]

    pairs = [lay_tasks(tmp_path / family, family, 2) for family in FAMILIES]
    async with anyio.create_task_group() as group:
        for task in chain.from_iterable(pairs):
            group.start_soon(solve, task)
    for old, new in pairs:
        carried = carry_over(last[old.task_id], task_solution(old), task_solution(new))
        assert comparable(carried) == comparable(last[new.task_id])


def check_solved(task: TaskSpec, harness: Harness, record: RolloutRecord) -> None:
    """One call for each command and one for the last word, each continuing the one before, and the whole reward."""
    num_steps = len(task_solution(task).steps)
    assert (record.outcome, record.detail) == (Outcome.COMPLETED, ""), task.task_id
    assert record.verdict is not None
    assert record.verdict.reward == 1.0, task.task_id
    assert [call.role for call in record.calls] == [CallRole.MAIN] * (num_steps + 1)
    assert [call.continues_id for call in record.calls] == [None, *range(num_steps)]
    assert {call.protocol for call in record.calls} == {harness.protocol}
    assert all(call.delivered for call in record.calls)
    assert record.timings.harness_cpu_s > 0.0


async def test_a_harness_that_cannot_start_is_no_zero_of_the_policy(bench: Bench, tmp_path: Path) -> None:
    (task,) = lay_tasks(tmp_path, "create", 1)
    broken = make_harness("claude_code", ClaudeCodeSettings(), tmp_path)
    program = broken.install_dir / "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
    program.parent.mkdir(parents=True)
    shutil.copy("/bin/false", program)
    record = await bench.run(broken, task, ScriptedResponder(script=lambda _: Reply()))
    assert record.outcome is Outcome.SANDBOX_FAILED
    assert record.verdict is None


# ---------------------------------------------------------------------------------------------------------------------
# What else a harness calls for
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_subagent_of_claude_code_is_told_apart_from_its_main_loop(bench: Bench, tmp_path: Path) -> None:
    (task,) = lay_tasks(tmp_path, "create", 1)

    def delegate(conversation: Conversation) -> Reply:
        asked = any(task.instruction in message.text for message in conversation.messages)
        if not asked or told(conversation, "tool"):
            return Reply(text="Done.")
        arguments = (
            '{"description":"d","prompt":"Say done.","subagent_type":"general-purpose","run_in_background":false}'
        )
        return Reply(tool_calls=(ToolCall(id="call_0", name="Agent", arguments=arguments),), finish_reason="tool_calls")

    record = await bench.run(bench.harness("claude_code", FULL), task, ScriptedResponder(script=delegate))
    assert record.outcome is Outcome.COMPLETED
    assert [call.role for call in record.calls] == [CallRole.MAIN, CallRole.SUBAGENT, CallRole.MAIN]
    assert "x-claude-code-agent-id" in record.calls[1].headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "tool", "argument"),
    [
        pytest.param("hermes", HermesSettings(), "delegate_task", "goal", id="hermes"),
        pytest.param("nanobot", NanobotSettings(), "spawn", "task", id="nanobot"),
    ],
)
async def test_a_subagent_is_told_apart_by_its_prompt(
    bench: Bench, tmp_path: Path, name: str, settings: HarnessSettings, tool: str, argument: str
) -> None:
    (task,) = lay_tasks(tmp_path, "create", 1)

    def delegate(conversation: Conversation) -> Reply:
        asked = any(task.instruction in message.text for message in conversation.messages)
        num_results = sum(message.role == "tool" for message in conversation.messages)
        if not asked or num_results == 2:
            return Reply(text="Done.")
        call = ToolCall(id="call_0", name=tool, arguments=json.dumps({argument: "Say done."}))
        if num_results == 1:  # nanobot does not wait for a subagent at the end
            call = shell_call(conversation.tools, ShellStep(command="sleep 2"), call_id="call_1")
        return Reply(tool_calls=(call,), finish_reason="tool_calls")

    record = await bench.run(bench.harness(name, settings), task, ScriptedResponder(script=delegate))
    assert record.outcome is Outcome.COMPLETED
    assert sorted(call.role for call in record.calls) == [*[CallRole.MAIN] * 3, CallRole.SUBAGENT]


@dataclass(frozen=True, kw_only=True)
class FullOnce(ScriptedResponder):
    """Says once that the window is full, when the harness comes back with its first result."""

    overflows: list[int] = field(default_factory=list)

    def prepare(self, conversation: Conversation, recorded: object) -> Prompt:
        if told(conversation, "tool") and not self.overflows:
            self.overflows.append(len(conversation.messages))
            raise ContextOverflow(40_000, 32_000)
        return Prompt(conversation=conversation, rendered=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("claude_code", ClaudeCodeSettings(compact=True)),
        ("pi", PiSettings(compact=True)),
        ("opencode", OpencodeSettings(compact=True)),
        *ALWAYS_COMPACTION,
    ],
)
async def test_compaction_is_told_apart_from_the_main_loop(
    bench: Bench, tmp_path: Path, name: str, settings: HarnessSettings
) -> None:
    (task,) = lay_tasks(tmp_path, "create", 1)
    solution = task_solution(task)

    def summarise(conversation: Conversation) -> Reply:
        return Reply(text=SUMMARY) if responder.overflows else oracle_reply(solution, conversation)

    responder = FullOnce(script=summarise)
    record = await bench.run(bench.harness(name, settings), task, responder)
    roles = [call.role for call in record.calls]
    assert roles[:2] == [CallRole.MAIN, CallRole.MAIN]
    assert CallRole.COMPACTION in roles[2:]


@pytest.mark.parametrize(("name", "settings"), NO_COMPACTION)
async def test_a_prompt_that_does_not_fit_ends_the_run_where_compaction_is_off(
    bench: Bench, tmp_path: Path, name: str, settings: HarnessSettings
) -> None:
    (task,) = lay_tasks(tmp_path, "create", 1)
    responder = FullOnce(script=partial(oracle_reply, task_solution(task)))
    record = await bench.run(bench.harness(name, settings), task, responder)
    assert [call.role for call in record.calls] == [CallRole.MAIN, CallRole.MAIN]
    assert record.outcome is Outcome.HARNESS_EXIT


def told(conversation: Conversation, role: str) -> bool:
    """A message of `role` stands in the history."""
    return any(message.role == role for message in conversation.messages)


# ---------------------------------------------------------------------------------------------------------------------
# The servers that a task declares
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("claude_code", ClaudeCodeSettings(), id="claude_code bare"),
        pytest.param("claude_code", FULL, id="claude_code full", marks=pytest.mark.slow),
        pytest.param("hermes", HermesSettings(), id="hermes"),
        pytest.param("nanobot", NanobotSettings(), id="nanobot"),
    ],
)
async def test_a_slow_server_of_the_task_is_offered_from_the_first_call_and_answers(
    bench: Bench, tmp_path: Path, name: str, settings: HarnessSettings
) -> None:
    (task,) = lay_tasks(tmp_path, "create", 1)
    server = McpServer(
        name="lab", argv=("/usr/bin/python3", f"{MCP_MOUNT}/mcp_server.py"), env={"NOTE": " Exactly.", "DELAY_S": "2"}
    )
    task = replace(task, mcp_servers=(server,), mcp_dir=str(MCP_SERVER.parent))

    def add(conversation: Conversation) -> Reply:
        if told(conversation, "tool"):
            return Reply(text="Done.")
        (tool,) = (tool for tool in conversation.tools if tool.description == "Add two numbers. Exactly.")
        call = ToolCall(id="call_0", name=tool.name, arguments='{"a":2,"b":3}')
        return Reply(tool_calls=(call,), finish_reason="tool_calls")

    recorder = Recorder(add)
    record = await bench.run(bench.harness(name, settings), task, ScriptedResponder(script=recorder))
    assert record.outcome is Outcome.COMPLETED, record.detail
    first, second = recorder.asked
    assert first.tools == second.tools
    assert "the sum is 5" in second.messages[-1].text
