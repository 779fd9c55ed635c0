"""Laws 2 and 4 over random rollouts."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given, settings

from clawhpc.records import CallRole
from clawhpc.tree.build import WholeCall, build_tree, whole_calls
from clawhpc.tree.prune import DropRule, prune_tree
from tests.fakes.prompts import rebuild_prompt_ids
from tests.fakes.session import Session
from tests.fakes.session_strategies import sessions

laws = settings(max_examples=60, deadline=None)


@laws
@given(sessions())
def test_a_path_is_exactly_its_calls_prompt_and_completion(session: Session) -> None:
    tree = build_tree("r", session.calls)
    assert tree.leaf_of_call.keys() == session.token_ids.keys()
    for call_id, leaf in tree.leaf_of_call.items():
        assert tree.path_token_ids(leaf) == session.token_ids[call_id]
        assert rebuild_prompt_ids(session.calls, call_id) == session.prompt_ids[call_id]


@laws
@given(sessions())
def test_each_draw_stands_once_as_sampled(session: Session) -> None:
    tree = build_tree("r", session.calls)
    drawn = {call.call_id: call.tokens for call in session.calls if call.tokens}
    sampled = {node.call_id: node for node in tree.nodes if node.sampled}
    assert Counter(node.call_id for node in tree.nodes if node.sampled) == Counter(drawn.keys())
    for call_id, tokens in drawn.items():
        assert sampled[call_id].token_ids == tokens.completion_ids
        assert sampled[call_id].sampling_logprobs == tokens.sampling_logprobs
        assert sampled[call_id].weight_versions == tokens.weight_versions
    for node in tree.nodes:
        if not node.sampled:
            assert (node.sampling_logprobs, node.weight_versions, node.call_id) == ((), (), None)
            assert node.token_ids


@laws
@given(sessions())
def test_starts_preorder_and_contiguity_hold(session: Session) -> None:
    tree = build_tree("r", session.calls)
    for index, node in enumerate(tree.nodes):
        assert node.node_id == index
        assert node.start == sum(len(tree.nodes[above].token_ids) for above in tree.path(index)[:-1])
        assert node.parent_id is None or node.parent_id < index
        below = [other.node_id for other in tree.nodes if index in tree.path(other.node_id)]
        assert below == list(range(index, index + len(below)))


@laws
@given(sessions())
def test_the_tree_has_exactly_one_token_per_distinct_labelled_prefix(session: Session) -> None:
    """As small as law 2 allows: the number of distinct prefixes when draws and copies are told apart by their call."""
    whole = whole_calls(session.calls)
    walks = {call_id: _labelled(call, whole) for call_id, call in whole.items()}
    prefixes = {walk[:end] for walk in walks.values() for end in range(1, len(walk) + 1)}
    assert build_tree("r", session.calls).num_tokens == sum(walk[-1].token is not None for walk in prefixes)


class Step(NamedTuple):
    """One step of a call's walk: a token with its label, or (None) an empty draw that the walk runs through."""

    token: int | None
    label: str
    call_id: int | None


def _labelled(call: WholeCall, whole: dict[int, WholeCall]) -> tuple[Step, ...]:
    """A call's tokens, told apart by what each is here: drawn by c at this place, copied from c, or context."""
    drawn = tuple(Step(token, "drawn", call.call_id) for token in call.tokens.completion_ids)
    return _labelled_prompt(call, whole) + drawn


def _labelled_prompt(call: WholeCall, whole: dict[int, WholeCall]) -> tuple[Step, ...]:
    walk: tuple[Step, ...] = ()
    position = 0
    for graft in call.repeats:
        walk += tuple(Step(token, "context", None) for token in call.prompt_ids[position : graft.start])
        position = graft.start + graft.length
        source, repeated = whole[graft.call_id], call.prompt_ids[graft.start : position]
        here = source.tokens.completion_ids == repeated and walk == _labelled_prompt(source, whole)
        walk += tuple(Step(token, "drawn" if here else "copied", graft.call_id) for token in repeated)
        walk += (Step(None, "empty", graft.call_id),) if here and not repeated else ()
    return walk + tuple(Step(token, "context", None) for token in call.prompt_ids[position:])


@laws
@given(sessions())
def test_what_is_pruned_and_what_is_live_are_all_of_it_and_leaves_are_conserved(session: Session) -> None:
    whole = build_tree("r", session.calls)
    pruned = prune_tree("r", session.calls, max_live_leaves=8)
    live = pruned.tree.leaf_of_call
    assert live.keys() | pruned.dropped.keys() == whole.leaf_of_call.keys()
    assert not live.keys() & pruned.dropped.keys()
    assert {node.call_id for node in pruned.tree.nodes if node.sampled} == live.keys()
    leaves = _unrepeated(session, set(whole.leaf_of_call))
    live_leaves = {call_id for ids in pruned.live_leaves.values() for call_id in ids}
    assert live_leaves == _unrepeated(session, set(live))
    assert sum(pruned.dropped_leaves.values()) == len(leaves & pruned.dropped.keys())
    assert leaves == (leaves & live_leaves) | (leaves & pruned.dropped.keys())


def _unrepeated(session: Session, among: set[int]) -> set[int]:
    whole = whole_calls(session.calls)
    return among - {graft.call_id for call_id in among for graft in whole[call_id].repeats}


@laws
@given(sessions())
def test_the_rules_drop_what_their_names_say_and_nothing_else(session: Session) -> None:
    pruned = prune_tree("r", session.calls, max_live_leaves=8)
    everything = prune_tree("r", session.calls, max_live_leaves=8, trained_roles=frozenset(CallRole))
    assert set(everything.dropped.values()) <= {DropRule.DEAD}
    for call in session.calls:
        rule = pruned.dropped.get(call.call_id)
        if rule is DropRule.ROLE:
            assert call.role is not CallRole.MAIN
        if rule is DropRule.DEAD:
            assert all(other.continues_id != call.call_id for other in session.calls)


@laws
@given(sessions())
def test_paths_that_survive_pruning_keep_their_tokens(session: Session) -> None:
    tree = prune_tree("r", session.calls, max_live_leaves=8).tree
    for call_id, leaf in tree.leaf_of_call.items():
        assert tree.path_token_ids(leaf) == session.token_ids[call_id]
