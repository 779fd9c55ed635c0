"""Captured rollouts of a made-up harness: text-only records of the oracle at work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from clawhpc.records import (
    Conversation,
    Message,
    Outcome,
    RolloutRecord,
    Tool,
)
from clawhpc.tasks.families import FAMILIES, SmallTask, draw_task
from clawhpc.tasks.oracle import oracle_reply
from tests.fakes.records import make_call, make_group, make_record

SYSTEM = "You are an agent. Use your tools. Today is 2026-11-29."
TOOLS = (
    Tool(
        name="Bash",
        description="Run a command.",
        parameters={"type": "object", "properties": {"command": {"type": "string"}}},
    ),
)


def hold_conversation(task: SmallTask) -> list[Conversation]:
    """The requests of a harness that the oracle answers, in order."""
    messages: tuple[Message, ...] = (
        Message(role="system", text=SYSTEM),
        Message(role="user", text=f"<task>{task.instruction}</task>"),
    )
    requests = [Conversation(model="policy", messages=messages, tools=TOOLS)]
    for step in task.steps:
        reply = oracle_reply(task, requests[-1])
        said = Message(role="assistant", text=reply.text, tool_calls=reply.tool_calls)
        result = Message(role="tool", text=step.output or "(no output)", tool_call_id=reply.tool_calls[0].id)
        messages = (*messages, said, result)
        requests.append(Conversation(model="policy", messages=messages, tools=TOOLS))
    return requests


def capture(task: SmallTask, harness: str = "pi", outcome: Outcome = Outcome.COMPLETED) -> RolloutRecord:
    """The rollout of `task` as a worker records it in the phase `capture`."""
    calls = []
    for call_id, request in enumerate(hold_conversation(task)):
        known = calls[-1] if calls else None
        calls.append(
            replace(
                make_call(call_id, oracle_reply(task, request)),
                continues_id=known.call_id if known else None,
                new_messages=request.messages[-1:] if known else request.messages,
                tools=() if known else request.tools,
                tools_same=known is not None,
            )
        )
    group = make_group(task.instruction, phase="capture", harness=harness)
    return make_record(group, calls=tuple(calls), outcome=outcome, reward=1.0 if outcome is Outcome.COMPLETED else None)


def captured_tasks(
    families: Sequence[str] = tuple(FAMILIES), harness: str = "pi"
) -> list[tuple[RolloutRecord, SmallTask]]:
    """One captured rollout of each family."""
    tasks = [draw_task(family, random.Random(family), "train") for family in families]
    return [(capture(task, harness), task) for task in tasks]
