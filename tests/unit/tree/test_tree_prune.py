"""Law 4: calls are dropped by named rules, and counted; and how drift is told from a harness's own forks."""

from __future__ import annotations

import pytest

from clawhpc.records import CallRole, Message
from clawhpc.tree.drift import Drift, measure_drift
from clawhpc.tree.prune import DropRule, PrunedTree, prune_tree
from tests.fakes.session import Ids, Session

HEAD, ASK, RESULT, MOVING = (1, 2, 3), (10, 11), (20, 21, 22), (90, 91)


def prune(session: Session, **kwargs: object) -> PrunedTree:
    return prune_tree("r", session.calls, **{"max_live_leaves": 8, **kwargs})  # type: ignore[arg-type]


def user(text: str) -> Message:
    return Message(role="user", text=text)


SYSTEM = Message(role="system", text="Be brief.")


def talk(session: Session, turns: int, head: Ids = HEAD, role: CallRole = CallRole.MAIN) -> tuple[Ids | int, ...]:
    """A conversation that extends itself; returns its whole history."""
    history: tuple[Ids | int, ...] = (head,)
    for turn in range(turns):
        history = (*history, session.call(*history, reply=(5, turn), role=role), RESULT)
    return history


def test_the_same_body_twice_leaves_one_live_leaf() -> None:
    session = Session()
    first = session.call(HEAD, reply=(5,))
    lost = session.call(HEAD, first, RESULT, reply=(6,))
    session.call(HEAD, first, RESULT, reply=(6,))
    pruned = prune(session)
    assert pruned.dropped == {lost: DropRule.DEAD}
    assert pruned.dropped_leaves == {"dead": 1}
    assert pruned.live_leaves == {0: (2,)}
    assert len(pruned.tree.leaves) == 1


def test_a_retry_of_the_very_first_call_is_dropped_although_it_opens_a_conversation_of_its_own() -> None:
    session = Session()
    lost = session.call(HEAD, ASK, reply=(5,))
    kept = session.call(HEAD, ASK, reply=(6,))
    session.call(HEAD, ASK, kept, RESULT, reply=(7,))
    assert prune(session).dropped == {lost: DropRule.DEAD}


NUDGE, MOVED = user("Please continue."), user("Last message.")


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        ((user("Note it."),), (user("Note it.\nYour previous response had no visible output."),)),
        ((user("Note it."),), (user("Note it."), NUDGE)),
        ((user("Note it."), MOVED), (user("Note it."), NUDGE, MOVED)),
    ],
)
def test_a_first_reply_that_was_left_out_is_dead_when_the_harness_asks_again_in_other_words(
    asked: tuple[Message, ...], again: tuple[Message, ...]
) -> None:
    session = Session()
    empty = session.call(HEAD, ASK, reply=(5,), new_messages=(SYSTEM, *asked))
    kept = session.call(HEAD, ASK, (12,), reply=(6,), new_messages=(SYSTEM, *again))
    session.call(HEAD, ASK, (12,), kept, RESULT, reply=(7,))
    pruned = prune(session)
    assert pruned.dropped == {empty: DropRule.DEAD}
    assert list(pruned.live_leaves) == [kept]


def test_a_first_reply_stays_where_the_next_conversation_is_about_something_else() -> None:
    session = Session()
    session.call(HEAD, ASK, reply=(5,), new_messages=(SYSTEM, user("Note it.")))
    session.call(HEAD, (12,), reply=(6,), new_messages=(SYSTEM, user("This session is being continued.")))
    assert prune(session).dropped == {}


@pytest.mark.parametrize(("asked", "then"), [("Fix", "Fixtures: write three."), ("", "Another one.")])
def test_a_first_reply_stays_where_the_next_request_only_begins_with_the_same_letters(asked: str, then: str) -> None:
    session = Session()
    session.call(HEAD, ASK, reply=(5,), new_messages=(SYSTEM, user(asked)))
    session.call(HEAD, (12,), reply=(6,), new_messages=(SYSTEM, user(then)))
    assert prune(session).dropped == {}


def test_twin_subagents_of_one_prompt_are_both_kept() -> None:
    session = Session()
    for agent in ("a", "b"):
        session.call(HEAD, reply=(5,), role=CallRole.SUBAGENT, headers={"x-agent-id": agent})
    assert prune(session, trained_roles=frozenset(CallRole)).dropped == {}


def test_retry_leaf_is_dropped_but_what_it_shared_stays() -> None:
    session = Session()
    first = session.call(HEAD, reply=(5,))
    session.call(HEAD, first, RESULT, (40,), reply=(6,))
    last = session.call(HEAD, first, RESULT, (41,), reply=(7,))
    tree = prune(session).tree
    assert [node.token_ids for node in tree.nodes] == [HEAD, (5,), (*RESULT, 41), (7,)]
    assert tree.path_token_ids(tree.leaf_of_call[last]) == session.token_ids[last]


def test_a_call_that_was_continued_is_an_inner_node_and_trains() -> None:
    session = Session()
    history = talk(session, 3)
    tree = prune(session).tree
    assert [node.call_id for node in tree.nodes if node.sampled] == [piece for piece in history if type(piece) is int]


def test_the_last_call_is_live_even_if_nobody_heard_it() -> None:
    session = Session()
    session.call(HEAD, reply=())
    assert prune(session).live_leaves == {0: (0,)}


def test_a_reply_that_only_a_failed_call_heard_is_not_dead() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    two = session.call(HEAD, one, RESULT, reply=(6,))
    session.fail(HEAD, one, RESULT, two, RESULT)
    last = session.call(HEAD, one, ASK, reply=(7,))
    pruned = prune(session)
    assert pruned.dropped == {}
    assert pruned.live_leaves == {0: (two, last)}


def test_a_reply_that_stands_early_in_a_later_history_was_heard() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    left = session.call(HEAD, one, RESULT, reply=(6,))
    right = session.call(HEAD, one, ASK, reply=(7,))
    last = session.call(HEAD, one, RESULT, left, ASK, right, reply=(8,))
    pruned = prune(session)
    assert pruned.dropped == {}
    assert pruned.live_leaves == {0: (last,)}


def test_a_late_side_call_does_not_make_the_last_word_dead() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    last = session.call(HEAD, one, RESULT, reply=(6,))
    side = session.call(HEAD, one, (40,), reply=(7,), role=CallRole.SIDE)
    pruned = prune(session)
    assert pruned.dropped == {side: DropRule.ROLE}
    assert last in pruned.tree.leaf_of_call


def test_subagents_compactions_and_side_calls_are_dropped_as_leaves_unless_asked_for() -> None:
    session = Session()
    main = talk(session, 2)
    talk(session, 3, head=(4, 4), role=CallRole.SUBAGENT)
    session.call((6, 6), reply=(7,), role=CallRole.SIDE)
    compaction = session.call(*main, (30,), reply=(8,), role=CallRole.COMPACTION)
    pruned = prune(session)
    assert pruned.dropped_leaves == {"role": 3}
    assert set(pruned.dropped) == {2, 3, 4, 5, compaction}
    wanted = prune(session, trained_roles={CallRole.MAIN, CallRole.SUBAGENT})
    assert wanted.dropped_leaves == {"role": 2}
    assert set(wanted.tree.leaf_of_call) == {0, 1, 2, 3, 4}


def test_the_conversation_before_a_compaction_trains_although_the_compaction_does_not() -> None:
    session = Session()
    before = talk(session, 3)
    session.call(*before, (30,), reply=(8,), role=CallRole.COMPACTION)
    after = session.call(HEAD, (50, 51), reply=(9,))
    pruned = prune(session)
    assert set(pruned.tree.leaf_of_call) == {0, 1, 2, after}
    assert pruned.live_leaves == {0: (2,), after: (after,)}


def test_a_dropped_reply_inside_a_live_prompt_is_context() -> None:
    session = Session()
    summary = session.call(HEAD, reply=(8,), role=CallRole.COMPACTION)
    last = session.call(HEAD, summary, ASK, reply=(9,))
    tree = prune(session).tree
    (copy,) = (node for node in tree.nodes if node.continues_id == summary)
    assert not copy.sampled
    assert tree.path_token_ids(tree.leaf_of_call[last]) == session.token_ids[last]


def move_last_message(session: Session, turns: int) -> None:
    history: tuple[Ids | int, ...] = (HEAD,)
    for turn in range(turns):
        history = (*history, session.call(*history, MOVING, reply=(5, turn)), RESULT)


def test_a_fork_at_every_turn_with_grafted_copies_is_one_live_leaf() -> None:
    session = Session()
    move_last_message(session, 20)
    pruned = prune(session)
    assert pruned.dropped == {}
    assert pruned.live_leaves == {0: (19,)}
    assert not pruned.over_branched
    assert len(pruned.tree.leaves) == 20


def encode_again(session: Session, turns: int) -> None:
    """Every history repeats the replies in other ids, so that no prompt extends a draw."""
    heard: int | None = None
    for turn in range(turns):
        history = HEAD + tuple(60 + earlier for earlier in range(turn))
        heard = session.call(history, reply=(5, turn), continues=heard, reencoded=turn)


def test_more_live_leaves_than_the_limit_discard_the_rollout() -> None:
    session = Session()
    encode_again(session, 4)
    assert prune(session, max_live_leaves=4).live_leaves == {0: (0, 1, 2, 3)}
    assert not prune(session, max_live_leaves=4).over_branched
    assert prune(session, max_live_leaves=3).over_branched


def test_dead_and_dropped_leaves_do_not_count_as_branches() -> None:
    session = Session()
    for _ in range(20):
        session.call(HEAD, ASK, reply=(5,))
        session.call(HEAD, (7,), reply=(5,), role=CallRole.SIDE)
    assert not prune(session, max_live_leaves=1).over_branched


def drift(session: Session) -> Drift:
    return measure_drift(session.calls, prune(session))


def test_a_clean_conversation_has_no_drift() -> None:
    session = Session()
    talk(session, 5)
    assert drift(session) == Drift(extended=4, copied=0, reencoded=0, reencoded_replies=0, unexplained_leaves=0)
    assert not drift(session).alarm


def test_a_moving_last_message_is_counted_as_copies_without_alarm() -> None:
    session = Session()
    move_last_message(session, 5)
    assert drift(session) == Drift(extended=0, copied=4, reencoded=0, reencoded_replies=0, unexplained_leaves=0)


def test_replies_encoded_again_are_counted_and_raise_the_alarm() -> None:
    """Eight rollouts became 64 samples of 1.8 M tokens elsewhere, and nobody was told."""
    session = Session()
    encode_again(session, 5)
    assert drift(session) == Drift(extended=0, copied=0, reencoded=4, reencoded_replies=4, unexplained_leaves=4)
    assert drift(session).alarm


def test_a_retry_is_explained_and_raises_no_alarm() -> None:
    session = Session()
    first = session.call(HEAD, reply=(5,))
    for _ in range(3):
        session.call(HEAD, first, RESULT, reply=(6,))
    assert not drift(session).alarm
