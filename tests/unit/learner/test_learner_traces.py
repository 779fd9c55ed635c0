"""From captured records to ids: nothing of a conversation is lost, and the ids are those of the proxy."""

from __future__ import annotations

import dataclasses
import random

import pytest

from clawhpc.engine.render import ChatRenderer, RecordedReply
from clawhpc.errors import LaunchError
from clawhpc.learner.traces import Example, Skill, Trace, encode_example, last_request, read_book, read_trace
from clawhpc.proxy.respond import PolicyResponder, PolicySampling
from clawhpc.records import Message, Outcome
from clawhpc.tasks.families import FAMILIES, SmallTask, draw_task
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.engine import FakeEngine
from tests.fakes.traces import SYSTEM, TOOLS, capture, captured_tasks, hold_conversation

ANY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatRenderer(folder, renderer="qwen3", thinking=False)


def drawn(family: str, seed: int = 0) -> SmallTask:
    return draw_task(family, random.Random(seed), "train")


def trace_of(family: str) -> Trace:
    task = drawn(family)
    return read_trace(capture(task), task)


@ANY_FAMILY
def test_the_last_request_is_rebuilt_from_the_differences_that_a_record_holds(family: str) -> None:
    task = drawn(family)
    requests = hold_conversation(task)
    rebuilt = last_request(capture(task).calls)
    assert rebuilt.messages == requests[-1].messages
    assert rebuilt.tools == TOOLS


@ANY_FAMILY
def test_a_retold_conversation_is_the_one_that_the_harness_would_have_had(family: str) -> None:
    other = drawn(family, seed=1)
    example = trace_of(family).retell(other)
    assert example.conversation.messages == hold_conversation(other)[-1].messages
    assert example.reply == Message(role="assistant", text="Done.")


@ANY_FAMILY
def test_each_reply_trains_and_stands_after_the_very_prompt_that_the_proxy_renders(
    renderer: ChatRenderer, family: str
) -> None:
    task = drawn(family, seed=1)
    tree = encode_example(renderer, trace_of(family).retell(task), "one")
    replies = [node for node in tree.nodes if node.sampled]
    requests = hold_conversation(task)
    assert len(replies) == len(requests) == len(task.steps) + 1
    responder = PolicyResponder(
        engine=FakeEngine(lambda _: ""), renderer=renderer, sampling=PolicySampling(context_window=10_000)
    )
    recorded: dict[int, RecordedReply] = {}
    for number, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        prompt = responder.prepare(request, recorded)
        assert prompt.rendered is not None
        whole = tree.path_token_ids(reply.node_id)
        assert whole[: reply.start] == prompt.rendered.prompt_ids
        assert reply.token_ids[-1] == renderer.stop_token_ids[0]
        recorded[len(request.messages)] = RecordedReply(call_id=number, completion_ids=reply.token_ids)


def test_without_its_head_a_conversation_has_the_same_ids_after_it(renderer: ChatRenderer) -> None:
    example = trace_of("relay").retell(drawn("relay", seed=2))
    whole, rest = (encode_example(renderer, one, "one") for one in (example, example.without_head))
    ids, tail = whole.path_token_ids(whole.leaves[0]), rest.path_token_ids(rest.leaves[0])
    assert ids[-len(tail) :] == tail
    assert SYSTEM in renderer.decode(ids[: -len(tail)])
    assert [node.token_ids for node in whole.nodes if node.sampled] == [
        node.token_ids for node in rest.nodes if node.sampled
    ]


def test_another_day_changes_the_date_of_the_head_and_nothing_else() -> None:
    task = dataclasses.replace(drawn("create"), instruction="Create the file of 2026-11-29")
    example = Example(conversation=hold_conversation(task)[-1], reply=Message(role="assistant", text="Done."))
    system, *others = example.on_day("2031-02-03").conversation.messages
    assert system.text == SYSTEM.replace("2026-11-29", "2031-02-03")
    assert tuple(others) == example.conversation.messages[1:]


def test_an_example_can_end_with_its_last_command() -> None:
    task = drawn("relay")
    cut = trace_of("relay").retell(task).up_to_last_command
    assert cut.conversation.messages == hold_conversation(task)[1].messages
    assert task.steps[1].command in cut.reply.tool_calls[0].arguments


def test_a_book_draws_tasks_from_the_side_of_the_split_that_is_asked_for() -> None:
    book = read_book([*captured_tasks(harness="pi"), *captured_tasks(("count",), harness="codex")])
    assert set(book.skills) == {Skill("codex", "count"), *(Skill("pi", family) for family in FAMILIES)}
    rng, skill = random.Random(0), Skill("pi", "count")
    trained = {book.draw(skill, rng, "train").conversation.messages[1].text for _ in range(60)}
    heldout = {book.draw(skill, rng, "heldout").conversation.messages[1].text for _ in range(60)}
    assert min(len(trained), len(heldout)) > 30
    assert not trained & heldout


def test_a_skill_that_was_never_shown_is_an_error_with_its_reason_and_one_failure_among_several_is_not() -> None:
    task, other = drawn("create"), drawn("create", seed=1)
    failed = capture(task, outcome=Outcome.SANDBOX_FAILED)
    assert read_book([(failed, task), (capture(other), other)]).skills == (Skill("pi", "create"),)
    with pytest.raises(LaunchError, match="no task of create in pi: sandbox_failed"):
        read_book([(failed, task)])


def test_calls_that_are_more_than_one_conversation_are_no_trace() -> None:
    task = drawn("relay")
    record = capture(task)
    forked = dataclasses.replace(
        record, calls=(*record.calls[:2], dataclasses.replace(record.calls[2], continues_id=0))
    )
    with pytest.raises(LaunchError, match="more than one conversation"):
        read_trace(forked, task)
