"""Each pinned harness, real and unmodified in a real sandbox, behind the real proxy, with the oracle for a model.

So the cold start captures conversations. What else a harness does is told by tests/conformance.
"""

from __future__ import annotations

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
from clawhpc.harness.registry import make_harness
from clawhpc.ledger import Ledger
from clawhpc.proxy.respond import ScriptedResponder
from clawhpc.records import (
    CallRole,
    Conversation,
    GroupKey,
    GroupPlan,
    Limits,
    Outcome,
    Reply,
    RolloutRecord,
    TaskSpec,
    ToolCall,
)
from clawhpc.rollout.run import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.base import Sandbox
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.tasks.clawgym import load_tasks
from clawhpc.tasks.families import FAMILIES, draw_task
from clawhpc.tasks.generate import write_task
from clawhpc.tasks.oracle import carry_over, oracle_reply, task_solution
from clawhpc.wire.canonical import canonical_arguments
from tests.conformance.profiles import PROFILES, Profile
from tests.sandbox_parts import missing, working_sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.harness, pytest.mark.sandbox]

QUICK = {"claude_code bare", "pi", "whitebox"}
EVERY_HARNESS = pytest.mark.parametrize(
    "profile",
    [
        pytest.param(profile, id=label, marks=() if label in QUICK else pytest.mark.slow)
        for label, profile in PROFILES.items()
    ],
)
NUM_AT_ONCE = 3
"""Rollouts of one test: harnesses take seconds of CPU time to start, and each has its own deadline."""

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
    bench: Bench, tmp_path: Path, profile: Profile
) -> None:
    harness = bench.harness(profile.name, profile.settings)
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
