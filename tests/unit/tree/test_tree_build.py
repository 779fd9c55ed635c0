"""Law 2, and what known systems got wrong about it, one test each."""

from __future__ import annotations

import dataclasses

import pytest

from clawhpc.records import Graft
from clawhpc.tree.build import build_tree
from clawhpc.tree.nodes import CallTree
from tests.fakes.prompts import rebuild_prompt_ids
from tests.fakes.session import Session

HEAD, ASK, MORE, RESULT = (1, 2, 3), (10, 11), (12, 13), (20, 21, 22)


def shape(tree: CallTree) -> list[tuple[int | None, tuple[int, ...], int | None, int | None]]:
    return [(node.parent_id, node.token_ids, node.call_id, node.continues_id) for node in tree.nodes]


def test_a_ten_call_conversation_is_one_path() -> None:
    session = Session()
    history: tuple[tuple[int, ...] | int, ...] = (HEAD,)
    for turn in range(10):
        reply = session.call(*history, reply=(100 + turn, 101 + turn))
        history = (*history, reply, (50 + turn,))
    tree = build_tree("r", session.calls)
    assert len(tree.leaves) == 1
    assert tree.num_tokens == 3 + 10 * 2 + 9
    assert tree.path_token_ids(tree.leaf_of_call[9]) == session.token_ids[9]


def test_a_thinking_models_ten_calls_are_one_path_when_the_recorded_ids_are_grafted() -> None:
    """Thinking stands in the draw and the harness echoes none of it: the ids, not the echo, make the prompt."""
    session = Session()
    thinking, answer = (7, 7, 8), (30,)
    history: tuple[tuple[int, ...] | int, ...] = (HEAD,)
    for turn in range(10):
        reply = session.call(*history, reply=(*thinking, *answer, turn))
        history = (*history, reply, (50 + turn,))
    assert len(build_tree("r", session.calls).leaves) == 1


def test_context_is_split_where_two_calls_part() -> None:
    session = Session()
    session.call(HEAD, ASK, reply=(5,))
    session.call(HEAD, MORE, reply=(6,))
    assert shape(build_tree("r", session.calls)) == [
        (None, HEAD, None, None),
        (0, ASK, None, None),
        (1, (5,), 0, None),
        (0, MORE, None, None),
        (3, (6,), 1, None),
    ]


def test_two_draws_of_equal_ids_are_two_nodes_and_a_continuation_extends_its_own() -> None:
    session = Session()
    first = session.call(HEAD, reply=(5, 6))
    second = session.call(HEAD, reply=(5, 6))
    session.call(HEAD, first, RESULT, reply=(9,))
    session.call(HEAD, second, RESULT, reply=(9,))
    tree = build_tree("r", session.calls)
    assert [tree.nodes[tree.leaf_of_call[call]].parent_id for call in (first, second)] == [0, 0]
    assert tree.path(tree.leaf_of_call[2])[1] == tree.leaf_of_call[first]
    assert tree.path(tree.leaf_of_call[3])[1] == tree.leaf_of_call[second]


def test_a_prompt_that_only_happens_to_agree_with_a_draw_does_not_run_through_it() -> None:
    session = Session()
    session.call(HEAD, reply=(5, 6))
    session.call(HEAD, (5, 6), RESULT, reply=(9,))
    tree = build_tree("r", session.calls)
    assert tree.nodes[tree.leaf_of_call[0]].parent_id == 0
    assert not tree.children[tree.leaf_of_call[0]]
    assert tree.path_token_ids(tree.leaf_of_call[1]) == session.token_ids[1]


def test_a_moving_last_message_forks_each_turn_and_its_copies_are_shared_context() -> None:
    """OpenClaw: call k + 1 is call k without its last message, then the reply, the result and the message again."""
    session, moving = Session(), (90, 91)
    one = session.call(HEAD, moving, reply=(5, 6))
    two = session.call(HEAD, one, RESULT, moving, reply=(7,))
    session.call(HEAD, one, RESULT, two, ASK, moving, reply=(8,))
    tree = build_tree("r", session.calls)
    copies = [node for node in tree.nodes if node.continues_id is not None]
    assert [(node.continues_id, node.token_ids) for node in copies] == [(one, (5, 6)), (two, (7,))]
    assert [node.call_id for node in tree.nodes if node.sampled] == [one, two, 2]
    assert len(tree.leaves) == 3


def test_an_empty_completion_is_a_leaf_and_can_be_continued() -> None:
    session = Session()
    empty = session.call(HEAD, reply=())
    session.call(HEAD, empty, ASK, reply=(9,))
    session.call(HEAD, MORE, reply=())
    tree = build_tree("r", session.calls)
    assert tree.nodes[tree.leaf_of_call[empty]].token_ids == ()
    assert tree.leaf_of_call[empty] in tree.path(tree.leaf_of_call[1])
    assert tree.leaf_of_call[2] in tree.leaves


def test_an_empty_completion_is_not_continued_by_a_retry_of_its_prompt() -> None:
    session = Session()
    empty = session.call(HEAD, reply=())
    again = session.call(HEAD, reply=(4,))
    tree = build_tree("r", session.calls)
    assert tree.leaf_of_call[empty] not in tree.path(tree.leaf_of_call[again])


def test_two_interleaved_conversations_give_two_clean_paths() -> None:
    session = Session()
    main = session.call(HEAD, (30,), reply=(5,))
    child = session.call(HEAD, (40,), reply=(6,))
    main_next = session.call(HEAD, (30,), main, RESULT, reply=(7,))
    child_next = session.call(HEAD, (40,), child, RESULT, reply=(8,))
    tree = build_tree("r", session.calls)
    assert len(tree.leaves) == 2
    assert tree.path_token_ids(tree.leaf_of_call[main_next]) == (*HEAD, 30, 5, *RESULT, 7)
    assert tree.path_token_ids(tree.leaf_of_call[child_next]) == (*HEAD, 40, 6, *RESULT, 8)


def test_a_nonce_in_the_head_costs_only_what_follows_it_not_a_star_of_whole_prompts() -> None:
    session = Session()
    session.call(HEAD, (70,), ASK, reply=(5,))
    session.call(HEAD, (71,), ASK, reply=(5,))
    tree = build_tree("r", session.calls)
    assert [node.parent_id for node in tree.nodes].count(None) == 1
    assert tree.nodes[0].token_ids == HEAD


def test_a_graft_inside_the_shared_prefix_need_not_be_recorded_twice() -> None:
    """A record may list only the grafts of its suffix: those of the prefix are its parent's."""
    session = Session()
    one = session.call(HEAD, reply=(5, 6))
    two = session.call(HEAD, one, RESULT, reply=(7,))
    session.call(HEAD, one, RESULT, two, ASK, reply=(8,))
    full = build_tree("r", session.calls)
    bare = [
        dataclasses.replace(call, tokens=call.tokens and dataclasses.replace(call.tokens, grafts=()))
        for call in session.calls
    ]
    assert build_tree("r", bare) == full


def test_a_grafted_copy_cut_short_is_labelled_context() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5, 6, 0))
    session.call(HEAD, (5, 6), ASK, reply=(7,), continues=one)
    call = session.calls[1]
    assert call.tokens is not None
    cut = dataclasses.replace(call.tokens, grafts=(Graft(call_id=one, start=3, length=2),))
    tree = build_tree("r", [session.calls[0], dataclasses.replace(call, tokens=cut)])
    assert shape(tree)[2:] == [(0, (5, 6), None, one), (2, ASK, None, None), (3, (7,), 1, None)]


def test_a_copy_and_plain_text_of_equal_ids_are_told_apart() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5, 6))
    session.call(ASK, (5, 6), reply=(7,))
    session.call(ASK, one, reply=(8,))
    tree = build_tree("r", session.calls)
    assert shape(tree)[2:] == [
        (None, ASK, None, None),
        (2, (5, 6), None, None),
        (3, (7,), 1, None),
        (2, (5, 6), None, one),
        (5, (8,), 2, None),
    ]


def test_a_fork_before_a_copy_inherits_nothing_of_it() -> None:
    session = Session()
    one = session.call(HEAD, reply=(5, 6))
    session.call(HEAD, one, RESULT, reply=(7,))
    session.call(HEAD, (5, 9, 9, 9), reply=(8,))
    assert session.calls[2].tokens is not None
    assert session.calls[2].tokens.prefix_length == len(HEAD) + 1
    tree = build_tree("r", session.calls)
    assert [tree.nodes[step].continues_id for step in tree.path(tree.leaf_of_call[2])] == [None, None, None]


def test_failed_calls_are_left_out() -> None:
    session = Session()
    session.call(HEAD, reply=(5,))
    session.fail(HEAD, 0, RESULT)
    assert list(build_tree("r", session.calls).leaf_of_call) == [0]


def test_a_rollout_without_calls_is_an_empty_tree() -> None:
    assert build_tree("r", []) == CallTree(rollout_id="r", nodes=(), leaf_of_call={})


def test_a_text_only_record_is_refused_by_name() -> None:
    session = Session()
    session.call(HEAD, reply=(5,))
    text_only = dataclasses.replace(session.calls[0], tokens=None)
    with pytest.raises(ValueError, match="call 0 is a text-only record"):
        build_tree("r", [text_only])


def test_tokens_that_do_not_fit_their_parent_are_refused_by_name() -> None:
    session = Session()
    session.call(HEAD, reply=(5,))
    session.call(HEAD, 0, reply=(6,))
    call = session.calls[1]
    assert call.tokens is not None
    too_long = dataclasses.replace(call, tokens=dataclasses.replace(call.tokens, prefix_length=9))
    with pytest.raises(ValueError, match="call 1: prefix_length 9, but its parent has 4 tokens"):
        build_tree("r", [session.calls[0], too_long])
    with pytest.raises(ValueError, match="call 1: its parent 7 is not an earlier call"):
        build_tree("r", [session.calls[0], dataclasses.replace(call, parent_id=7)])


def test_a_prompt_that_repeats_a_later_call_is_refused_by_name() -> None:
    session = Session()
    session.call(HEAD, reply=(5,))
    session.call(HEAD, 0, reply=(6,))
    call = session.calls[0]
    assert call.tokens is not None
    foretold = dataclasses.replace(call.tokens, grafts=(Graft(call_id=1, start=1, length=1),))
    with pytest.raises(ValueError, match="call 0: its prompt repeats call 1, which did not come before it"):
        build_tree("r", [dataclasses.replace(call, tokens=foretold), session.calls[1]])


def test_prompts_are_rebuilt_from_their_differences() -> None:
    session = Session()
    one = session.call(HEAD, ASK, reply=(5,))
    two = session.call(HEAD, ASK, one, RESULT, reply=(6,))
    three = session.call(HEAD, MORE, two, reply=(7,))
    for call_id in (one, two, three):
        assert rebuild_prompt_ids(session.calls, call_id) == session.prompt_ids[call_id]
