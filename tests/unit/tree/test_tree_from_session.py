"""From a harness's requests, through the proxy's session, to what trains: what splits trees elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from clawhpc.proxy.session import Session
from clawhpc.records import CallRecord
from clawhpc.tree.build import build_tree
from clawhpc.tree.drift import measure_drift
from clawhpc.tree.prune import DropRule, PrunedTree, prune_tree
from tests.fakes.caller import AGENT_HEADER, ask, policy, session_of, text, user
from tests.fakes.engine import FakeEngine, replies

pytestmark = pytest.mark.anyio

Body = dict[str, Any]


def prune(calls: tuple[CallRecord, ...]) -> PrunedTree:
    return prune_tree("r", calls, max_live_leaves=1)


async def test_two_calls_that_differ_only_in_the_nonce_of_the_first_system_block_share_their_prefix() -> None:
    async with session_of(policy(FakeEngine(replies("one", "two")))) as session:
        for nonce in ("a1f", "03c"):
            billing = text(f"x-anthropic-billing-header: cc_version=2.1.328.{nonce};")
            await ask(session, user(f"go {nonce}"), system=[billing, text("You are an agent. " * 20)])
        calls = session.calls()
    tree = build_tree("r", calls)
    assert [node.parent_id for node in tree.nodes].count(None) == 1
    assert len(tree.nodes[0].token_ids) > len("You are an agent. " * 20)


async def test_cache_markers_that_roll_do_not_break_the_path() -> None:
    marker = {"cache_control": {"type": "ephemeral"}}
    async with session_of(policy(FakeEngine(replies("one", "two", "three")))) as session:
        history: list[Body] = []
        for turn in range(3):
            reply = await ask(session, *history, user([text(f"say {turn}", **marker)]))
            history += [user(f"say {turn}"), reply]
        calls = session.calls()
    assert len(build_tree("r", calls).leaves) == 1
    assert measure_drift(calls, prune(calls)).extended == 2


async def talk(session: Session, turns: int) -> None:
    """Each request ends with a message that is gone from the next one."""
    history = [user("task")]
    for turn in range(turns):
        reply = await ask(session, *history, user(f"ephemeral {turn}"))
        history += [reply, user(f"result {turn}")]


async def test_a_moving_last_message_is_one_conversation_of_one_live_leaf() -> None:
    async with session_of(policy(FakeEngine(lambda prompt: "ok"))) as session:
        await talk(session, 20)
        calls = session.calls()
    pruned = prune(calls)
    assert pruned.dropped == {}
    assert pruned.live_leaves == {0: (19,)}
    assert not pruned.over_branched
    assert measure_drift(calls, pruned).copied == 19


async def test_a_request_sent_again_leaves_one_live_leaf_at_the_start_and_in_the_middle() -> None:
    async with session_of(policy(FakeEngine(replies("a", "a", "b", "b", "c")))) as session:
        await ask(session, user("hi"))
        first = await ask(session, user("hi"))
        await ask(session, user("hi"), first, user("go"))
        second = await ask(session, user("hi"), first, user("go"))
        await ask(session, user("hi"), first, user("go"), second, user("on"))
        calls = session.calls()
    pruned = prune(calls)
    assert pruned.dropped == {0: DropRule.DEAD, 2: DropRule.DEAD}
    assert len(pruned.tree.leaves) == 1
    assert pruned.tree.num_sampled_tokens == sum(len(calls[at].tokens.completion_ids) for at in (1, 3, 4))  # type: ignore[union-attr]


async def test_interleaved_conversations_are_clean_paths_and_the_subagent_does_not_train() -> None:
    async with session_of(policy(FakeEngine(lambda prompt: "yes"))) as session:
        main, sub = [user("main")], [user("sub")]
        for turn in range(3):
            main += [await ask(session, *main), user(f"main {turn}")]
            sub += [await ask(session, *sub, headers={AGENT_HEADER: "1"}), user(f"sub {turn}")]
        calls = session.calls()
    assert len(build_tree("r", calls).leaves) == 2
    pruned = prune(calls)
    assert pruned.dropped == dict.fromkeys((1, 3, 5), DropRule.ROLE)
    assert pruned.dropped_leaves == {"role": 1}
    assert len(pruned.tree.leaves) == 1


async def test_an_empty_reply_that_the_harness_passes_over_is_a_dead_leaf() -> None:
    async with session_of(policy(FakeEngine(replies("one", "", "two")))) as session:
        first = await ask(session, user("hi"))
        await ask(session, user("hi"), first, user("go"))
        await ask(session, user("hi"), first, user(text("go"), text("Your previous response had no visible output.")))
        calls = session.calls()
    assert prune(calls).dropped == {1: DropRule.DEAD}
