"""Solve small tasks by rule, and carry one solved conversation over to other tasks of its family.

The cold start captures a few conversations of a real harness with the oracle in the model's place, and trains on
thousands that were carried over from them. That is exact because three things in a conversation depend on the task,
the instruction, the commands, and what they print, and all else is the harness's own.
"""

from __future__ import annotations

import json
from dataclasses import replace

from clawhpc.records import Conversation, Message, Reply, TaskSpec, Tool, ToolCall
from clawhpc.tasks.families import ShellStep, SmallTask, small_task

SHELL_TOOL_NAMES = frozenset({"bash", "shell", "exec", "exec_command", "run_shell_command", "terminal"})
"""Lower-cased names under which harnesses offer a shell."""
COMMAND_ARGUMENTS = ("command", "cmd")
FINAL_TEXT = "Done."
SUBMIT_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How a model ends a run where the prompt asks for this command: mini-swe-agent takes no text for an end."""


def task_solution(task: TaskSpec) -> SmallTask:
    """The generated task behind `task`, from its metadata. Raises `ValueError` for a task that was not generated."""
    if "family" not in task.metadata or "slots" not in task.metadata:
        raise ValueError(f"task {task.task_id} is not a generated one: its metadata has no family and slots")
    return small_task(task.metadata["family"], task.metadata["slots"])


def oracle_reply(task: SmallTask, conversation: Conversation) -> Reply:
    """What a model that solves `task` says next: its next command, or after the last one a short text."""
    done = sum(len(message.tool_calls) for message in conversation.messages)
    steps = task.steps
    if any(SUBMIT_COMMAND in message.text for message in conversation.messages):
        steps = (*steps, ShellStep(command=SUBMIT_COMMAND))
    if done >= len(steps):
        return Reply(text=FINAL_TEXT)
    call = shell_call(conversation.tools, steps[done], call_id=f"call_{done}")
    return Reply(tool_calls=(call,), finish_reason="tool_calls")


def shell_call(tools: tuple[Tool, ...], step: ShellStep, *, call_id: str) -> ToolCall:
    """One command as a call of the shell tool among `tools`. Raises `ValueError` where there is none."""
    for tool in tools:
        argument = next((name for name in COMMAND_ARGUMENTS if name in tool.parameters.get("properties", {})), None)
        if tool.name.lower() in SHELL_TOOL_NAMES and argument:
            return ToolCall(id=call_id, name=tool.name, arguments=json.dumps({argument: step.command}))
    raise ValueError(f"no shell among the tools {', '.join(tool.name for tool in tools)}")


def carry_over(conversation: Conversation, old: SmallTask, new: SmallTask) -> Conversation:
    """The conversation that the same harness would have with the oracle about `new`.

    `conversation` is one that it had with the oracle about `old`, a task of the same family. Raises `ValueError` when
    it is not.
    """
    if old.family != new.family:
        raise ValueError(f"a conversation about {old.family} cannot be carried over to {new.family}")
    told = [old.instruction in message.text for message in conversation.messages]
    if sum(told) != 1:
        raise ValueError(f"the instruction stands in {sum(told)} messages, not in one: {old.instruction}")
    messages = list(conversation.messages)
    position = told.index(True)
    messages[position] = _swap(messages[position], old.instruction, new.instruction)
    done = 0
    for index in range(position + 1, len(messages)):
        if messages[index].tool_calls:
            messages[index] = _recall(messages[index], old.steps[done], new.steps[done])
            done += 1
        elif messages[index].role == "tool":
            messages[index] = _retell(messages[index], old.steps[done - 1], new.steps[done - 1])
    return replace(conversation, messages=tuple(messages))


def _swap(message: Message, old: str, new: str) -> Message:
    if message.text.count(old) != 1:
        raise ValueError(f"{old!r} stands {message.text.count(old)} times, not once, in a {message.role} message")
    return replace(message, text=message.text.replace(old, new))


def _retell(message: Message, old: ShellStep, new: ShellStep) -> Message:
    """What a command printed; some harnesses repeat the command before it."""
    before, command, after = message.text.rpartition(old.command)
    printed = replace(message, text=after)
    if old.output:
        printed = _swap(printed, old.output, new.output)
    return replace(message, text=before + (new.command if command else "") + printed.text)


def _recall(message: Message, old: ShellStep, new: ShellStep) -> Message:
    (call,) = message.tool_calls
    arguments = {
        name: new.command if value == old.command else value for name, value in json.loads(call.arguments).items()
    }
    return replace(message, tool_calls=(replace(call, arguments=json.dumps(arguments)),))
