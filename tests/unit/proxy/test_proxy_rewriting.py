"""What harnesses do to the rest of a history: whatever stands around a recorded reply, its ids are those drawn."""

from __future__ import annotations

from typing import Any

import pytest

from clawhpc.engine.render import ChatRenderer
from clawhpc.records import CallRecord
from clawhpc.tree.prune import DropRule, prune_tree
from tests.fakes.caller import AGENT_HEADER, ask, session_of, text, user
from tests.fakes.engine import FakeEngine
from tests.fakes.exact import (
    LIMITS,
    AnthropicDialect,
    ChatDialect,
    check_exact,
    check_one_path,
    drift_of,
    exact_policy,
    make_renderer,
)
from tests.fakes.prompts import repeated_calls

pytestmark = pytest.mark.anyio

Body = dict[str, Any]
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
TOOL = {"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return make_renderer(tmp_path_factory.mktemp("plain"))


def check_one_conversation(calls: tuple[CallRecord, ...], engine: FakeEngine, copied: int) -> None:
    """Each call continues the one before it; `copied` of them behind another prompt."""
    check_exact(calls, engine)
    last = len(calls) - 1
    assert {call.conversation_id for call in calls} == {0}
    assert [call.continues_id for call in calls] == [None, *range(last)]
    assert repeated_calls(calls, last) == [*range(last)]
    drift = drift_of(calls)
    assert (drift.extended, drift.copied, drift.reencoded, drift.alarm) == (last - copied, copied, 0, False)
    pruned = prune_tree("r", calls, max_live_leaves=1)
    assert (pruned.dropped, pruned.live_leaves) == ({}, {0: (last,)})


async def test_twenty_turns_of_openclaws_moving_last_message_are_one_conversation_of_one_live_leaf(
    plain: ChatRenderer,
) -> None:
    """It vanishes from the history and stands at the new end: each call attaches at the message before it."""
    responder, engine = exact_policy(plain, *[f"Step {turn}.\n" + CALL for turn in range(20)])
    dialect, history = ChatDialect(), [{"role": "user", "content": "[Sun 2026-11-29 15:28 UTC] do it"}]
    moving = {"role": "user", "content": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>" + " keep going" * 20}
    async with session_of(responder, limits=LIMITS) as session:
        for _ in range(20):
            reply = await dialect.ask(session, [*history, moving])
            history += [reply, *dialect.results(reply)]
        calls = session.calls()
    check_one_conversation(calls, engine, copied=19)
    new = [len(call.tokens.suffix_ids) for call in calls if call.tokens]
    assert max(new[1:]) < min(new[1:]) + 40, "a call brings a reply, a result and the message that moves, and no more"


async def test_a_tool_that_appears_in_mid_run_changes_the_root_and_nothing_else(plain: ChatRenderer) -> None:
    responder, engine = exact_policy(plain, CALL, CALL, CALL, "done")
    dialect, history = AnthropicDialect(), [user("do it")]
    async with session_of(responder) as session:
        for turn in range(4):
            tools = [TOOL, {**TOOL, "name": "Late"}][: 1 + (turn >= 2)]
            reply = await dialect.ask(session, history, tools=tools)
            history += [reply, *dialect.results(reply)]
        calls = session.calls()
    check_one_conversation(calls, engine, copied=1)
    assert [call.tools_same for call in calls] == [False, True, False, True]


async def test_claude_codes_billing_line_and_its_system_messages_in_the_array_break_nothing(
    plain: ChatRenderer,
) -> None:
    responder, engine = exact_policy(plain, *[CALL] * 5, "done")
    dialect = AnthropicDialect()
    history: list[Body] = [user("do it"), {"role": "system", "content": "Be brief. " * 30}]
    async with session_of(responder) as session:
        for turn in range(6):
            billing = text(f"x-anthropic-billing-header: cc_version=2.1.328.{turn:03x}; cc_is_subagent=0;")
            reply = await dialect.ask(session, history, system=[billing, text("You are an agent.")])
            history += [reply, *dialect.results(reply)]
            history += [{"role": "system", "content": f"Reminder {turn}."}] * (turn % 2)
        calls = session.calls()
    check_one_path(calls, engine)


EDITS = {
    "edited": lambda history: [user("do it, please"), *history[1:]],
    "dropped": lambda history: history[2:],
    "summed up": lambda history: [user("Before: much."), *history[3:]],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
async def test_replies_are_grafted_behind_messages_that_were_edited_or_dropped(plain: ChatRenderer, edit: Any) -> None:
    said = [f"{turn}\n{CALL}" for turn in range(4)]
    responder, engine = exact_policy(plain, *said, "done")
    dialect, history = AnthropicDialect(), [user("do it")]
    async with session_of(responder) as session:
        for _ in said:
            reply = await dialect.ask(session, history)
            history += [reply, *dialect.results(reply)]
        await dialect.ask(session, edit(history))
        calls = session.calls()
    check_exact(calls, engine)
    assert (calls[4].continues_id, calls[4].conversation_id) == (3, 0)
    assert repeated_calls(calls, 4)[-2:] == [2, 3]
    assert drift_of(calls).copied == 1


async def test_a_part_of_a_broken_answer_that_a_harness_keeps_is_text_of_its_own(plain: ChatRenderer) -> None:
    """Qwen Code shows the policy what it heard, asks it to resume, and takes both out again; opencode keeps the text.
    The whole draw is a dead leaf.
    """
    responder, _ = exact_policy(plain, CALL, "I will now\n" + CALL, CALL, "on", "done")
    dialect, history = ChatDialect(), [{"role": "user", "content": "do it"}]
    async with session_of(responder) as session:
        first = await dialect.ask(session, history)
        history += [first, *dialect.results(first)]
        await dialect.ask(session, history)  # it breaks on the way
        partial: list[Body] = [{"role": "assistant", "content": "I will now"}]
        resumed = await dialect.ask(session, [*history, *partial, {"role": "user", "content": "resume"}])
        history += [resumed, *dialect.results(resumed)]
        on = await dialect.ask(session, history)
        await dialect.ask(session, [*history, on, *partial])
        calls = session.calls()
    assert [call.continues_id for call in calls] == [None, 0, 0, 2, 3]
    assert [call.tokens and call.tokens.reencoded_replies for call in calls] == [0, 0, 1, 0, 1]
    pruned = prune_tree("r", calls, max_live_leaves=1)
    assert (pruned.dropped, pruned.live_leaves) == ({1: DropRule.DEAD}, {0: (4,)})
    assert drift_of(calls).reencoded_replies == 2


async def test_a_repeated_answer_of_two_draws_is_that_of_the_later_draw(plain: ChatRenderer) -> None:
    responder, engine = exact_policy(plain, "yes", "yes", "done")
    async with session_of(responder) as session:
        await ask(session, user("do it"))
        reply = await ask(session, user("do it"))
        await ask(session, user("do it"), reply, user("go on"))
        calls = session.calls()
    check_exact(calls, engine)
    assert calls[2].continues_id == 1
    assert prune_tree("r", calls, max_live_leaves=1).dropped == {0: DropRule.DEAD}


async def test_interleaved_subagents_are_clean_paths(plain: ChatRenderer) -> None:
    """They say the same at the same time, under another system prompt."""
    responder, engine = exact_policy(plain, *[CALL] * 9)
    histories: list[list[Body]] = [[user("do it")] for _ in range(3)]
    dialect = AnthropicDialect()
    async with session_of(responder) as session:
        for _ in range(3):
            for number, history in enumerate(histories):
                headers = {AGENT_HEADER: str(number)} if number else {}
                reply = await ask(session, *history, system=f"You are agent {number}.", headers=headers)
                history += [reply, *dialect.results(reply)]
        calls = session.calls()
    check_exact(calls, engine)
    assert [call.conversation_id for call in calls] == [0, 1, 2] * 3
    assert [call.continues_id for call in calls] == [None, None, None, 0, 1, 2, 3, 4, 5]
    assert drift_of(calls).extended == 2, "of the main loop; subagents do not train"


async def test_assistant_messages_in_a_row_are_grafted_too(plain: ChatRenderer) -> None:
    responder, engine = exact_policy(plain, "one", "two", "done")
    dialect, history = ChatDialect(), [{"role": "user", "content": "do it"}]
    async with session_of(responder) as session:
        for _ in range(3):
            history += [await dialect.ask(session, history)]
        calls = session.calls()
    check_one_path(calls, engine)


async def test_a_blank_message_that_a_harness_makes_up_is_not_another_conversations_blank_reply(
    plain: ChatRenderer,
) -> None:
    """Hermes writes one after a broken stream, and goes on in words of its own."""
    thought = "<think>\nthe secret of another conversation\n</think>"
    responder, engine = exact_policy(plain, thought, "two", "three")
    made_up: Body = {"role": "assistant", "content": ""}
    async with session_of(responder) as session:
        await ask(session, user("one"))
        await ask(session, user("two"))
        await ask(session, user("two"), made_up, user("go on"))
        calls = session.calls()
    check_exact(calls, engine, rewritten=True)
    assert calls[2].continues_id is None
    assert "secret" not in plain.decode(engine.requests[2].prompt_ids)


async def test_a_blank_reply_that_is_sent_back_is_the_one_that_was_drawn(plain: ChatRenderer) -> None:
    responder, engine = exact_policy(plain, "<think>\none\n</think>", "<think>\ntwo\n</think>", "done")
    async with session_of(responder) as session:
        first = await ask(session, user("a"))
        second = await ask(session, user("a"), first, user("b"))
        await ask(session, user("a, edited"), first, user("b"), second, user("c"))
        calls = session.calls()
    check_exact(calls, engine)
    assert repeated_calls(calls, 2) == [0, 1]


async def test_a_reply_that_a_harness_takes_apart_or_edits_behind_another_is_counted(plain: ChatRenderer) -> None:
    responder, engine = exact_policy(plain, CALL + CALL, "One long answer", "on", "done")
    async with session_of(responder) as session:
        first = await ask(session, user("do it"))
        one, two = ({"role": "assistant", "content": [call]} for call in first["content"])
        results = AnthropicDialect().results(first)[0]["content"]
        history = [user("do it"), one, user([results[0]]), two, user([results[1]])]
        await ask(session, *history)
        await ask(session, *history, {"role": "assistant", "content": "One"}, user("go on"))
        await ask(session, user("another task"), {"role": "assistant", "content": "Me too"}, user("go on"))
        calls = session.calls()
    check_exact(calls, engine, rewritten=True)
    assert [call.tokens and call.tokens.reencoded_replies for call in calls] == [0, 1, 2, 0]
