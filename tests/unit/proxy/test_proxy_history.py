from __future__ import annotations

import pytest

from clawhpc.records import CallRole, Message, Reply
from clawhpc.tree.build import build_tree, whole_calls
from tests.fakes.caller import AGENT_HEADER, ask, policy, session_of, text, tool_result, user
from tests.fakes.engine import END, FakeEngine, encode_drawn, replies, tool_call
from tests.fakes.prompts import rebuild_prompt_ids, repeated_calls

pytestmark = pytest.mark.anyio

CACHED = {"cache_control": {"type": "ephemeral"}}


async def test_a_long_run_is_one_path_whatever_claude_code_rewrites() -> None:
    """The cache marker moves, its block becomes a string, blank text and thinking go, arguments are parsed."""
    said = [f"<think>{n}</think>\n\n" + tool_call("Bash", command=f"ls {n}", timeout=float(n)) for n in range(6)]
    engine = FakeEngine(replies(*said, "done"))
    history = [user("list")]
    async with session_of(policy(engine)) as session:
        for turn in range(6):
            marked = [*history[:-1], user(_mark_last_block(history[-1]))]
            reply = await ask(session, *marked, system=[text("Be brief.", **CACHED)])
            (call,) = [block for block in reply["content"] if block["type"] == "tool_use"]
            call["input"] = {"timeout": turn, "command": f"ls {turn}"}
            history += [{"role": "assistant", "content": [call]}, user([tool_result(call["id"], f"file{turn}")])]
        await ask(session, *history, system="Be brief.")
        calls = session.calls()
    for call in calls:
        assert rebuild_prompt_ids(calls, call.call_id) == engine.requests[call.call_id].prompt_ids
    tree = build_tree("r", calls)
    assert len(tree.nodes) == 2 * len(calls), "each call adds one run of context and one reply"
    assert [call.continues_id for call in calls] == [None, 0, 1, 2, 3, 4, 5]
    assert {call.conversation_id for call in calls} == {0}
    assert [len(call.new_messages) for call in calls] == [2, 1, 1, 1, 1, 1, 1]


def _mark_last_block(message: dict[str, object]) -> list[dict[str, object]]:
    content = message["content"]
    blocks = [text(content)] if isinstance(content, str) else [dict(block) for block in content]  # type: ignore[attr-defined]
    blocks[-1] |= CACHED
    return blocks


async def test_a_recorded_reply_is_grafted_also_when_what_stands_before_it_has_changed() -> None:
    """A harness that ends each request with a message that is gone from the next one: a continuation, not a fork."""
    engine = FakeEngine(replies("one", "two", "three"))
    async with session_of(policy(engine)) as session:
        first = await ask(session, user("a"), user("ephemeral 0"))
        second = await ask(session, user("a"), first, user("b"), user("ephemeral 1"))
        await ask(session, user("a"), first, user("b"), second, user("c"), user("ephemeral 2"))
        calls = session.calls()
    assert [call.continues_id for call in calls] == [None, 0, 1]
    assert {call.conversation_id for call in calls} == {0}
    assert repeated_calls(calls, 2) == [0, 1]
    prompt = engine.requests[2].prompt_ids
    for graft in whole_calls(calls)[2].repeats:
        drawn = calls[graft.call_id].tokens
        assert drawn is not None
        assert prompt[graft.start : graft.start + graft.length] == drawn.completion_ids
    assert calls[2].new_messages == (Message(role="user", text="c"), Message(role="user", text="ephemeral 2"))
    assert [rebuild_prompt_ids(calls, 2), rebuild_prompt_ids(calls, 1)] == [prompt, engine.requests[1].prompt_ids]


async def test_two_interleaved_conversations_give_two_clean_paths() -> None:
    engine = FakeEngine(lambda prompt: "yes")
    agent = {AGENT_HEADER: "1"}
    async with session_of(policy(engine)) as session:
        main, sub = [user("main")], [user("sub")]
        for turn in range(3):
            main += [await ask(session, *main, system="M"), user(f"go on {turn}")]
            sub += [await ask(session, *sub, system="S", headers=agent), user(f"go on {turn}")]
        calls = session.calls()
    assert [call.conversation_id for call in calls] == [0, 1, 0, 1, 0, 1]
    assert [call.continues_id for call in calls] == [None, None, 0, 1, 2, 3]
    assert [call.role for call in calls] == [CallRole.MAIN, CallRole.SUBAGENT] * 3
    assert calls[1].headers == agent


async def test_equal_replies_of_different_calls_keep_their_order() -> None:
    engine = FakeEngine(lambda prompt: "ok")
    async with session_of(policy(engine)) as session:
        reply = await ask(session, user("a"))
        await ask(session, user("a"), reply, user("a"))
        await ask(session, user("a"), reply, user("a"), reply, user("a"))
        # The same again after the harness has edited the first message: no history is exact any more.
        await ask(session, user("edited"), reply, user("a"), reply, user("a"), reply, user("b"))
        calls = session.calls()
    edited = calls[3]
    assert repeated_calls(calls, edited.call_id) == [0, 1, 2]
    assert edited.continues_id == 2


async def test_an_edited_conversation_is_told_from_its_twin_by_what_its_last_reply_continued() -> None:
    engine = FakeEngine(replies("yes", "yes", "main done", "sub done", "ok"))
    async with session_of(policy(engine)) as session:
        main, sub = [user("main")], [user("sub")]
        for _ in range(2):
            main += [await ask(session, *main), user("go on")]
            sub += [await ask(session, *sub), user("go on")]
        await ask(session, user("edited"), *main[1:])
        calls = session.calls()
    edited = calls[4]
    assert repeated_calls(calls, edited.call_id) == [0, 2]


async def test_an_edited_conversation_that_was_cut_back_finds_the_reply_by_what_it_answered() -> None:
    engine = FakeEngine(lambda prompt: "ok")
    async with session_of(policy(engine)) as session:
        reply = await ask(session, user("a"), user("first"))
        await ask(session, user("a"), user("first"), reply, user("second"))
        await ask(session, user("edited"), user("first"), reply, user("third"))
        calls = session.calls()
    cut = calls[2]
    assert cut.continues_id == 0


async def test_equal_conversations_of_which_one_is_ahead_are_not_mixed() -> None:
    """Call 4 went on from 0 and 2; the equal replies of 1 and 3 were drawn later than those, and stand elsewhere."""
    engine = FakeEngine(lambda prompt: "yes")
    twin = {AGENT_HEADER: "1"}
    async with session_of(policy(engine)) as session:
        one, other = [user("go")], [user("go")]
        for _ in range(2):
            one += [await ask(session, *one), user("on")]
            other += [await ask(session, *other, headers=twin), user("on")]
        one += [await ask(session, *one), user("on")]
        await ask(session, *one)
        calls = session.calls()
    assert [call.continues_id for call in calls] == [None, None, 1, 1, 3, 4]
    assert rebuild_prompt_ids(calls, 5) == engine.requests[5].prompt_ids
    assert repeated_calls(calls, 5) == [1, 3, 4]


async def test_replies_in_another_order_than_they_were_drawn_are_still_grafted() -> None:
    engine = FakeEngine(replies("one", "two", "ok"))
    async with session_of(policy(engine)) as session:
        one, two = await ask(session, user("a")), await ask(session, user("b"))
        await ask(session, user("c"), two, user("d"), one, user("e"))
        calls = session.calls()
    mixed = calls[2]
    assert repeated_calls(calls, mixed.call_id) == [1, 0]
    assert (mixed.continues_id, mixed.new_messages) == (0, (Message(role="user", text="e"),))


async def test_parallel_tool_calls_are_one_reply() -> None:
    engine = FakeEngine(replies(tool_call("Bash", command="a") + tool_call("Bash", command="b"), "done"))
    async with session_of(policy(engine)) as session:
        reply = await ask(session, user("go"))
        first, second = (block["id"] for block in reply["content"])
        await ask(session, user("go"), reply, user(tool_result(first, "A"), tool_result(second, "B"), text("hurry")))
        calls = session.calls()
    assert calls[0].reply is not None
    assert calls[0].reply.finish_reason == "tool_calls"
    assert calls[1].continues_id == 0
    assert [message.role for message in calls[1].new_messages] == ["tool", "tool", "user"]


async def test_an_empty_reply_and_a_reply_cut_by_length_are_recorded_and_recognised() -> None:
    engine = FakeEngine(replies("", "abcdef", "c"))
    async with session_of(policy(engine)) as session:
        empty = await ask(session, user("a"))
        assert empty["content"] == []
        cut = await ask(session, user("a"), empty, user("b"), max_tokens=3)
        await ask(session, user("a"), empty, user("b"), cut, user("go on"))
        calls = session.calls()
    assert calls[0].tokens is not None
    assert calls[0].tokens.completion_ids == (END,)
    assert calls[1].reply == Reply(text="abc", finish_reason="length")
    assert calls[1].tokens is not None
    assert calls[1].tokens.completion_ids == encode_drawn("abc")
    assert [call.continues_id for call in calls] == [None, 0, 1]
    assert rebuild_prompt_ids(calls, 2) == engine.requests[2].prompt_ids
