"""Captured conversations as examples to imitate: rebuilt from records, retold about other tasks, encoded once.

    RolloutRecord ──read_trace──▶ Trace ──retell──▶ Example ──encode_example──▶ CallTree

Here, and only here, text becomes training data (law 1). A reply is encoded where the policy would have drawn it, after
the very prompt that the proxy would have rendered, so imitation and reinforcement see the same ids.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from clawhpc.engine.render import ChatRenderer, RecordedReply
from clawhpc.errors import LaunchError
from clawhpc.records import CallRecord, Conversation, Message, Outcome, Reply, RolloutRecord
from clawhpc.tasks.families import SmallTask, Split, draw_task
from clawhpc.tasks.oracle import carry_over, oracle_reply
from clawhpc.tree.nodes import CallTree
from clawhpc.tree.sequence import sequence_tree

ISO_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


class Skill(NamedTuple):
    """To solve the tasks of one family in one harness."""

    harness: str
    family: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """A conversation in which every reply is right."""

    conversation: Conversation
    """The request for the last reply: the whole history."""
    reply: Message
    """The last one."""

    @property
    def up_to_last_command(self) -> Example:
        """The same without what follows its last command: the draws on which the reward depends."""
        messages = (*self.conversation.messages, self.reply)
        last = max(index for index, message in enumerate(messages) if message.tool_calls)
        return Example(conversation=replace(self.conversation, messages=messages[:last]), reply=messages[last])

    @property
    def without_head(self) -> Example:
        """The same without its system messages and tools: a tenth of the tokens."""
        messages = tuple(message for message in self.conversation.messages if message.role != "system")
        return replace(self, conversation=replace(self.conversation, messages=messages, tools=()))

    def on_day(self, day: str) -> Example:
        """The same with another ISO date wherever the system messages name one: a policy outlives its first day."""
        messages = tuple(
            replace(message, text=ISO_DATE.sub(day, message.text)) if message.role == "system" else message
            for message in self.conversation.messages
        )
        return replace(self, conversation=replace(self.conversation, messages=messages))


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One captured conversation, in which the oracle solved a task."""

    harness: str
    task: SmallTask
    conversation: Conversation
    """The harness's last request: the whole history but for the last reply."""

    def retell(self, task: SmallTask) -> Example:
        """The conversation that the harness would have had about `task`, of the same family."""
        conversation = carry_over(self.conversation, self.task, task)
        return Example(conversation=conversation, reply=as_message(oracle_reply(task, conversation)))


class TraceBook:
    """Traces of every skill, and any number of examples retold from them."""

    def __init__(self, traces: Iterable[Trace]) -> None:
        found: defaultdict[Skill, list[Trace]] = defaultdict(list)
        for trace in traces:
            found[Skill(trace.harness, trace.task.family)].append(trace)
        self._traces: Mapping[Skill, Sequence[Trace]] = dict(found)

    @property
    def skills(self) -> tuple[Skill, ...]:
        """What there are traces of."""
        return tuple(self._traces)

    @property
    def of_one_harness(self) -> TraceBook:
        """The traces of the first harness alone."""
        first = self.skills[0].harness
        return TraceBook(trace for skill, traces in self._traces.items() if skill.harness == first for trace in traces)

    def draw(self, skill: Skill, rng: random.Random, split: Split) -> Example:
        """An example about a fresh task from one side of the split."""
        return rng.choice(self._traces[skill]).retell(draw_task(skill.family, rng, split))


def read_book(records: Iterable[tuple[RolloutRecord, SmallTask]]) -> TraceBook:
    """The traces in captured records. LaunchError, with the reason, when a skill has none that was solved."""
    traces, failed = [], {}
    for record, task in records:
        if record.outcome is Outcome.COMPLETED and record.verdict is not None and record.verdict.raw_reward == 1.0:
            traces.append(read_trace(record, task))
        else:
            failed[Skill(record.key.harness, task.family)] = f"{record.outcome} {record.detail}".strip()
    book = TraceBook(traces)
    for skill, reason in failed.items():
        if skill not in book.skills:
            raise LaunchError(f"the oracle solved no task of {skill.family} in {skill.harness}: {reason}")
    return book


def read_trace(record: RolloutRecord, task: SmallTask) -> Trace:
    """The conversation of a captured rollout. LaunchError when its calls do not continue one another."""
    if any(call.continues_id != (call.call_id - 1 if call.call_id else None) for call in record.calls):
        raise LaunchError(f"rollout {record.rollout_id}: its calls are more than one conversation, no trace to imitate")
    return Trace(harness=record.key.harness, task=task, conversation=last_request(record.calls))


def last_request(calls: Sequence[CallRecord]) -> Conversation:
    """The request of the last of `calls`, each of which continues the one before it."""
    request = Conversation(model="", messages=())
    for call in calls:
        said = (as_message(calls[call.continues_id].reply),) if call.continues_id is not None else ()
        request = replace(
            request,
            messages=(*request.messages, *said, *call.new_messages),
            tools=request.tools if call.tools_same else call.tools,
        )
    return request


def as_message(reply: Reply | None) -> Message:
    """A reply as it stands in the history of the next call."""
    assert reply is not None, "a call that another one continues has a reply"
    return Message(role="assistant", text=reply.text, thinking=reply.thinking, tool_calls=reply.tool_calls)


def encode_example(renderer: ChatRenderer, example: Example, name: str) -> CallTree:
    """The ids of an example; its replies are what trains, each with its stop token."""
    replies = {
        index: RecordedReply(call_id=index, completion_ids=renderer.encode_reply(message))
        for index, message in enumerate(example.conversation.messages)
        if message.role == "assistant"
    }
    prompt = renderer.render(example.conversation, replies)
    assert prompt.reencoded_replies == 0, f"{name}: this chat format cannot repeat a reply as it was drawn"
    ids = (*prompt.prompt_ids, *renderer.encode_reply(example.reply))
    trained = [index >= len(prompt.prompt_ids) for index in range(len(ids))]
    for graft in prompt.grafts:
        trained[graft.start : graft.start + graft.length] = [True] * graft.length
    return sequence_tree(name, ids, trained)
