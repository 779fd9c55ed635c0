"""Draws continue one another whatever the harness did to the prompts between them; and the flat order of draws."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from clawhpc.records import CallRole
from clawhpc.tree.build import build_tree, whole_calls
from clawhpc.tree.conversation import Turn, conversation_paths, conversation_turns
from clawhpc.tree.nodes import CallTree, Node
from clawhpc.tree.prune import prune_tree
from tests.fakes.session import Ids, Session
from tests.fakes.session_strategies import sessions, some_ids

HEAD, RESULT, MOVING = (1, 2, 3), (20, 21, 22), (90, 91)
EVERY_ROLE = frozenset(CallRole)

laws = settings(max_examples=60, deadline=None)


def prune(session: Session, roles: frozenset[CallRole] = EVERY_ROLE) -> CallTree:
    return prune_tree("r", session.calls, max_live_leaves=99, trained_roles=roles).tree


def parents(turns: tuple[Turn, ...]) -> dict[int, int | None]:
    """call_id -> the call that it continues."""
    return {turn.call_id: None if turn.parent is None else turns[turn.parent].call_id for turn in turns}


def paths(turns: tuple[Turn, ...]) -> list[list[int]]:
    """The call_ids of each path."""
    return [[turns[at].call_id for at in path] for path in conversation_paths(turns)]


def move_last_message(session: Session, turns: int) -> None:
    history: tuple[Ids | int, ...] = (HEAD,)
    for turn in range(turns):
        history = (*history, session.call(*history, MOVING, reply=(5, turn)), RESULT)


def test_a_harness_that_forks_at_every_turn_is_one_chain() -> None:
    session = Session()
    move_last_message(session, 20)
    tree = prune(session)
    assert len(tree.leaves) == 20
    assert paths(conversation_turns(tree)) == [list(range(20))]


def test_a_conversation_that_extends_itself_is_one_chain() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5, 6))
    two = session.call(HEAD, one, RESULT, reply=(7,))
    session.call(HEAD, one, RESULT, two, RESULT, reply=(8, 9, 9))
    turns = conversation_turns(prune(session))
    assert paths(turns) == [[0, 1, 2]]
    assert [(turn.start, turn.stop) for turn in turns] == [(0, 2), (2, 3), (3, 6)]


def test_a_turn_says_where_its_tokens_stand_among_the_trees_draws() -> None:
    """The copy of the second call's reply stands before its draw in the tree, so preorder is not the order of calls."""
    session = Session()
    session.call((1,), reply=(5, 5))
    other = session.call((2,), reply=(6,))
    session.call((1,), other, RESULT, reply=(7, 7, 7))
    tree = prune(session)
    drawn = [token for node_id, _, _ in tree.draws for token in tree.nodes[node_id].token_ids]
    assert drawn == [5, 5, 7, 7, 7, 6]
    turns = conversation_turns(tree)
    assert [drawn[turn.start : turn.stop] for turn in turns] == [[5, 5], [6], [7, 7, 7]]
    assert parents(turns) == {0: None, 1: None, 2: 1}


def test_the_order_of_draws_is_preorder_and_counts_empty_ones() -> None:
    session = Session()
    empty = session.call(HEAD, reply=())
    session.call(HEAD, empty, RESULT, reply=(5, 6))
    tree = build_tree("r", session.calls)
    assert [(start, stop) for _, start, stop in tree.draws] == [(0, 0), (0, 2)]
    assert parents(conversation_turns(tree)) == {0: None, 1: 0}


def test_a_conversation_that_goes_on_twice_from_one_reply_forks_there() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    left = session.call(HEAD, one, RESULT, reply=(6,))
    left_end = session.call(HEAD, one, RESULT, left, RESULT, reply=(7,))
    session.fail(HEAD, one, RESULT, left, RESULT, left_end, RESULT)
    right = session.call(HEAD, one, MOVING, reply=(8,))
    right_end = session.call(HEAD, one, MOVING, right, RESULT, reply=(9,))
    assert paths(conversation_turns(prune(session))) == [[one, left, left_end], [one, right, right_end]]


def test_a_retry_that_is_dropped_leaves_the_chain_whole() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    session.call(HEAD, one, RESULT, reply=(6,))
    kept = session.call(HEAD, one, RESULT, reply=(7,))
    last = session.call(HEAD, one, RESULT, kept, RESULT, reply=(8,))
    assert paths(conversation_turns(prune(session))) == [[one, kept, last]]


def test_two_conversations_that_take_turns_stay_two() -> None:
    session = Session()
    one, other = session.call(HEAD, reply=(5,)), session.call(HEAD, (4,), reply=(6,))
    one_more = session.call(HEAD, one, RESULT, reply=(7,))
    other_more = session.call(HEAD, (4,), other, RESULT, reply=(8,))
    assert paths(conversation_turns(prune(session))) == [[one, one_more], [other, other_more]]


def test_a_call_that_does_not_train_is_looked_through() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    side = session.call(HEAD, one, RESULT, reply=(6,), role=CallRole.SIDE)
    last = session.call(HEAD, one, RESULT, side, RESULT, reply=(7,))
    assert paths(conversation_turns(prune(session, frozenset({CallRole.MAIN})))) == [[one, last]]


def test_subagents_and_compactions_are_conversations_of_their_own() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    sub = session.call((4, 4), reply=(6,), role=CallRole.SUBAGENT)
    sub_more = session.call((4, 4), sub, RESULT, reply=(7,), role=CallRole.SUBAGENT)
    two = session.call(HEAD, one, RESULT, reply=(8,))
    compaction = session.call(HEAD, one, RESULT, two, MOVING, reply=(9,), role=CallRole.COMPACTION)
    turns = conversation_turns(prune(session))
    assert paths(turns) == [[sub, sub_more], [one, two], [compaction]]
    assert [turn.role.value for turn in turns] == ["main", "subagent", "subagent", "main", "compaction"]


@pytest.mark.parametrize("keeps_first", [True, False])
@pytest.mark.parametrize("roles", [EVERY_ROLE, frozenset({CallRole.MAIN})])
def test_what_goes_on_after_a_compaction_continues_what_its_history_still_holds(
    keeps_first: bool, roles: frozenset[CallRole]
) -> None:
    session = Session()
    one = session.call(HEAD, reply=(5,))
    two = session.call(HEAD, one, RESULT, reply=(6,))
    summary = session.call(HEAD, one, RESULT, two, MOVING, reply=(7,), role=CallRole.COMPACTION)
    kept: tuple[Ids | int, ...] = (HEAD, one) if keeps_first else (MOVING,)
    after = session.call(*kept, summary, RESULT, reply=(8,))
    found = parents(conversation_turns(prune(session, roles)))
    assert found[after] == (one if keeps_first else None)
    assert found[two] == one


def test_a_tree_that_no_call_made_has_its_conversations_too() -> None:
    nodes = (
        Node(node_id=0, parent_id=None, start=0, token_ids=(1,), sampled=False),
        Node(node_id=1, parent_id=0, start=1, token_ids=(2, 3), sampled=True, call_id=1),
        Node(node_id=2, parent_id=1, start=3, token_ids=(4,), sampled=False),
        Node(node_id=3, parent_id=2, start=4, token_ids=(5, 6), sampled=True, call_id=3),
    )
    turns = conversation_turns(CallTree(rollout_id="lesson", nodes=nodes, leaf_of_call={1: 1, 3: 3}))
    assert conversation_paths(turns) == ((0, 1),)
    assert [(turn.start, turn.stop) for turn in turns] == [(0, 2), (2, 4)]


def test_a_tree_without_draws_has_no_conversation() -> None:
    assert conversation_turns(build_tree("r", [])) == ()
    assert conversation_paths(()) == ()


@laws
@given(sessions(replies=some_ids))
def test_a_turn_continues_the_last_reply_of_its_role_that_its_history_contains(session: Session) -> None:
    tree = prune(session)
    whole = whole_calls(session.calls)
    role_of = {call.call_id: call.role for call in session.calls if call.call_id in tree.leaf_of_call}
    for call_id, parent in parents(conversation_turns(tree)).items():
        repeated = [graft.call_id for graft in whole[call_id].repeats]
        heard = [reply for reply in repeated if role_of.get(reply) == role_of[call_id]]
        assert parent == (heard[-1] if heard else None)


@laws
@given(sessions())
def test_turns_cover_the_draws_once_and_each_comes_after_what_it_continues(session: Session) -> None:
    tree = prune(session)
    turns = conversation_turns(tree)
    spans = sorted((turn.start, turn.stop) for turn in turns)
    assert spans == [(start, stop) for _, start, stop in tree.draws]
    assert [at for start, stop in spans for at in range(start, stop)] == list(range(tree.num_sampled_tokens))
    assert all(turn.parent is None or turn.parent < index for index, turn in enumerate(turns))
    walked = conversation_paths(turns)
    assert {at for path in walked for at in path} == set(range(len(turns)))
    assert len({path[-1] for path in walked}) == len(walked)
    for path in walked:
        assert [turns[at].parent for at in path] == [None, *path[:-1]]


@laws
@given(sessions(replies=some_ids))
def test_what_the_main_turns_continue_does_not_depend_on_the_roles_that_train(session: Session) -> None:
    alone = parents(conversation_turns(prune(session, frozenset({CallRole.MAIN}))))
    beside = parents(conversation_turns(prune(session)))
    assert {call_id: beside[call_id] for call_id in alone} == alone
