import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.records import Conversation, Message, Reply, TaskSpec, Tool
from clawhpc.tasks.families import FAMILIES, SmallTask, draw_task
from clawhpc.tasks.oracle import FINAL_TEXT, SUBMIT_COMMAND, carry_over, oracle_reply, task_solution
from tests.fakes.records import script_verifier

ANY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
BASH = Tool(name="Bash", description="Runs a command.", parameters={"type": "object", "properties": {"command": {}}})
READ = Tool(name="Read", description="Reads a file.", parameters={"type": "object", "properties": {"path": {}}})


def held_conversation(task: SmallTask, result_of: str = "{output}") -> Conversation:
    """What a harness sends last, when the oracle has solved `task` in it."""
    head = (
        Message(role="system", text="You have tools."),
        Message(role="user", text=f"<now>\n{task.instruction}\n</now>"),
    )
    conversation = Conversation(model="m", messages=head, tools=(READ, BASH))
    while (reply := oracle_reply(task, conversation)).tool_calls:
        (call,) = reply.tool_calls
        step = next(step for step in task.steps if step.command == json.loads(call.arguments)["command"])
        turn = Message(role="assistant", tool_calls=(call,))
        told = result_of.format(command=step.command, output=step.output or "(no output)")
        result = Message(role="tool", text=told, tool_call_id=call.id)
        conversation = replace(conversation, messages=(*conversation.messages, turn, result))
    assert reply.text == FINAL_TEXT
    return conversation


@ANY_FAMILY
@given(seed=st.integers(0, 10_000))
def test_the_oracle_gives_each_command_once_and_then_stops(family: str, seed: int) -> None:
    task = draw_task(family, random.Random(seed), "train")
    calls = [call for message in held_conversation(task).messages for call in message.tool_calls]
    assert [json.loads(call.arguments) for call in calls] == [{"command": step.command} for step in task.steps]
    assert {call.name for call in calls} == {"Bash"}
    assert len({call.id for call in calls}) == len(calls)


@ANY_FAMILY
@pytest.mark.parametrize("result_of", ["{output}", "Command: {command}\nOutput: {output}\nExit Code: 0"])
@given(seeds=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)))
def test_a_carried_over_conversation_is_the_one_that_the_other_task_gives(
    family: str, result_of: str, seeds: tuple[int, int]
) -> None:
    old, new = (draw_task(family, random.Random(seed), "train") for seed in seeds)
    assert carry_over(held_conversation(old, result_of), old, new) == held_conversation(new, result_of)


def test_other_arguments_of_a_call_are_kept() -> None:
    old, new = (draw_task("create", random.Random(seed), "train") for seed in (1, 2))
    conversation = held_conversation(old)
    call = conversation.messages[2].tool_calls[0]
    call = replace(call, arguments=json.dumps({"timeout": 5, "command": old.steps[0].command}))
    messages = (*conversation.messages[:2], Message(role="assistant", tool_calls=(call,)), *conversation.messages[3:])
    carried = carry_over(replace(conversation, messages=messages), old, new)
    assert json.loads(carried.messages[2].tool_calls[0].arguments) == {"timeout": 5, "command": new.steps[0].command}


def test_a_conversation_about_something_else_cannot_be_carried_over() -> None:
    create, append = (draw_task(family, random.Random(0), "train") for family in ("create", "append"))
    with pytest.raises(ValueError, match="a conversation about create cannot be carried over to append"):
        carry_over(held_conversation(create), create, append)
    other = draw_task("create", random.Random(1), "train")
    with pytest.raises(ValueError, match="stands in 0 messages, not in one"):
        carry_over(held_conversation(create), other, create)


def test_an_output_that_stands_twice_in_a_result_cannot_be_carried_over() -> None:
    old, new = (draw_task("relay", random.Random(seed), "train") for seed in (1, 2))
    conversation = held_conversation(old)
    doubled = replace(conversation.messages[3], text=f"{old.steps[0].output} {old.steps[0].output}")
    messages = (*conversation.messages[:3], doubled, *conversation.messages[4:])
    with pytest.raises(ValueError, match="stands 2 times, not once, in a tool message"):
        carry_over(replace(conversation, messages=messages), old, new)


def test_a_run_ends_with_the_command_that_the_prompt_asks_for() -> None:
    task = draw_task("create", random.Random(0), "train")
    held = held_conversation(task)
    assert oracle_reply(task, held) == Reply(text=FINAL_TEXT)
    asked = Message(role="user", text=f"Submit by issuing `{SUBMIT_COMMAND}`.")
    (call,) = oracle_reply(task, replace(held, messages=(asked, *held.messages))).tool_calls
    assert json.loads(call.arguments) == {"command": SUBMIT_COMMAND}


def test_a_harness_without_a_shell_is_refused() -> None:
    task = draw_task("create", random.Random(0), "train")
    with pytest.raises(ValueError, match="no shell among the tools Read"):
        oracle_reply(task, Conversation(model="m", messages=(), tools=(READ,)))


def test_a_task_that_was_not_generated_has_no_known_solution() -> None:
    task = TaskSpec(
        task_id="t", instruction="Think.", input_dir=None, verifier=script_verifier("/r"), metadata={"category": ""}
    )
    with pytest.raises(ValueError, match="task t is not a generated one"):
        task_solution(task)
