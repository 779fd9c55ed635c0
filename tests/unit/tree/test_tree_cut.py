"""A tree over the budget in pieces: every draw once, after the tokens that it was drawn after, and little repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.records import CallRole, VersionSpan
from clawhpc.tree.build import build_tree
from clawhpc.tree.cut import cut_tree, refuse_large_roles, refuse_long_paths, split_roles
from clawhpc.tree.nodes import CallTree, Node
from tests.fakes.session import Session
from tests.fakes.session_strategies import sessions

laws = settings(max_examples=100, deadline=None)


def tree_of(*outline: tuple[int, str, int]) -> CallTree:
    """A tree from (depth, "draw" or "context", number of tokens), in preorder."""
    nodes: list[Node] = []
    above: list[Node] = []
    for node_id, (depth, kind, length) in enumerate(outline):
        del above[depth:]
        drawn = kind == "draw"
        node = Node(
            node_id=node_id,
            parent_id=above[-1].node_id if above else None,
            start=above[-1].end if above else 0,
            token_ids=tuple(range(node_id, node_id + length)),
            sampled=drawn,
            sampling_logprobs=tuple(-0.5 - index for index in range(length)) if drawn else (),
            weight_versions=(VersionSpan(version=node_id, start=0, end=length),) if drawn else (),
            call_id=100 - node_id if drawn else None,
        )
        nodes.append(node)
        above.append(node)
    leaf_of_call = {node.call_id: node.node_id for node in nodes if node.call_id is not None}
    return CallTree(rollout_id="r", nodes=tuple(nodes), leaf_of_call=leaf_of_call)


@st.composite
def outlined_trees(draw: st.DrawFn) -> CallTree:
    """Any shape: several roots, draws below draws, empty draws, context that leads to no draw."""
    outline: list[tuple[int, str, int]] = []
    for _ in range(draw(st.integers(1, 14))):
        depth = draw(st.integers(0, outline[-1][0] + 1 if outline else 0))
        kind = draw(st.sampled_from(("draw", "draw", "context")))
        outline.append((depth, kind, draw(st.integers(0 if kind == "draw" else 1, 5))))
    return tree_of(*outline)


trees = outlined_trees() | sessions().map(lambda session: build_tree("r", session.calls))


@st.composite
def fitting_trees(draw: st.DrawFn) -> tuple[CallTree, int]:
    """A tree and a budget that each of its calls fits, near the longest more often than not."""
    tree = draw(trees)
    longest = max((tree.nodes[leaf].end for leaf in tree.leaf_of_call.values()), default=0)
    return tree, longest + draw(st.integers(0, 8))


Draw = tuple[int | None, tuple[int, ...], tuple[float, ...], tuple[VersionSpan, ...]]


def draws(*pieces: CallTree) -> list[Draw]:
    """What trains, in order."""
    return [
        (node.call_id, node.token_ids, node.sampling_logprobs, node.weight_versions)
        for piece in pieces
        for node in piece.nodes
        if node.sampled and node.token_ids
    ]


@laws
@given(fitting_trees())
def test_the_draws_of_the_pieces_are_those_of_the_tree_in_its_order(case: tuple[CallTree, int]) -> None:
    tree, budget = case
    pieces = cut_tree(tree, budget)
    assert draws(*pieces) == draws(tree)
    assert all(piece.rollout_id == tree.rollout_id for piece in pieces)
    if tree.num_tokens > budget:
        assert all(draws(piece) for piece in pieces)


@laws
@given(fitting_trees())
def test_a_draw_stands_after_the_same_tokens_in_its_piece_as_in_the_tree(case: tuple[CallTree, int]) -> None:
    tree, budget = case
    for piece in cut_tree(tree, budget):
        for call_id, leaf in piece.leaf_of_call.items():
            assert piece.nodes[leaf].call_id == call_id
            assert piece.path_token_ids(leaf) == tree.path_token_ids(tree.leaf_of_call[call_id])


@laws
@given(fitting_trees())
def test_a_piece_is_a_tree_in_preorder_within_the_budget(case: tuple[CallTree, int]) -> None:
    tree, budget = case
    for piece in cut_tree(tree, budget):
        assert piece.num_tokens <= budget
        assert_sound(piece)


def assert_sound(tree: CallTree) -> None:
    last_path: tuple[int, ...] = ()
    for index, node in enumerate(tree.nodes):
        assert node.node_id == index
        assert node.start == sum(len(tree.nodes[above].token_ids) for above in tree.path(index)[:-1])
        assert node.parent_id is None or node.parent_id in last_path
        last_path = tree.path(index)
        if not node.sampled:
            assert (node.call_id, node.sampling_logprobs, node.weight_versions) == (None, (), ())
    assert tree.leaf_of_call == {node.call_id: node.node_id for node in tree.nodes if node.sampled}


@laws
@given(fitting_trees())
def test_a_piece_holds_nothing_that_no_draw_of_its_own_needs(case: tuple[CallTree, int]) -> None:
    tree, budget = case
    if tree.num_tokens > budget:
        for piece in cut_tree(tree, budget):
            ends = [node.node_id for node in piece.nodes if node.sampled and node.token_ids]
            assert {step for end in ends for step in piece.path(end)} == set(range(len(piece.nodes)))


@laws
@given(fitting_trees())
def test_no_cut_in_the_same_order_repeats_fewer_tokens(case: tuple[CallTree, int]) -> None:
    tree, budget = case
    if tree.num_tokens > budget:
        pieces = cut_tree(tree, budget)
        assert (sum(piece.num_tokens for piece in pieces), len(pieces)) == min(all_cuts(tree, budget), default=(0, 0))


def all_cuts(tree: CallTree, budget: int) -> Iterator[tuple[int, int]]:
    """(tokens, pieces) of every way to share out the paths in order, from the definition."""
    ends = [node.node_id for node in tree.nodes if node.sampled and node.token_ids]
    paths = [tree.path(end) for end in ends if not any(end in tree.path(other)[:-1] for other in ends)]
    for choice in range(2 ** (len(paths) - 1) if paths else 0):
        cuts = [0, *(at + 1 for at in range(len(paths) - 1) if choice >> at & 1), len(paths)]
        sizes = [size_of(tree, paths[start:stop]) for start, stop in pairwise(cuts)]
        if max(sizes) <= budget:
            yield sum(sizes), len(sizes)


def size_of(tree: CallTree, paths: list[tuple[int, ...]]) -> int:
    return sum(len(tree.nodes[step].token_ids) for step in set().union(*paths))


@laws
@given(trees, st.integers(0, 20))
def test_exactly_the_calls_over_the_budget_are_refused(tree: CallTree, budget: int) -> None:
    fitting, refused = refuse_long_paths(tree, budget)
    long = {call_id for call_id, leaf in tree.leaf_of_call.items() if len(tree.path_token_ids(leaf)) > budget}
    assert (set(refused), len(refused)) == (long, len(long))
    assert fitting.leaf_of_call.keys() == tree.leaf_of_call.keys() - long
    assert [draw for draw in draws(tree) if draw[0] not in long] == draws(fitting)
    assert_sound(fitting)
    for call_id, leaf in fitting.leaf_of_call.items():
        assert fitting.path_token_ids(leaf) == tree.path_token_ids(tree.leaf_of_call[call_id])
    if refused:
        leaves = {node_id for node_id in fitting.leaves if not fitting.nodes[node_id].sampled}
        assert not leaves, "context that leads to no call"
    assert draws(*cut_tree(fitting, budget)) == draws(fitting)


@laws
@given(sessions())
def test_what_fits_comes_back_as_it_is(session: Session) -> None:
    tree = build_tree("r", session.calls)
    longest = max((tree.nodes[leaf].end for leaf in tree.leaf_of_call.values()), default=0)
    assert refuse_long_paths(tree, longest) == (tree, ())
    assert refuse_long_paths(tree, longest)[0] is tree
    assert [id(piece) for piece in cut_tree(tree, tree.num_tokens)] == [id(tree)]


def test_a_draw_before_the_fork_trains_in_the_first_piece_and_is_context_in_the_second() -> None:
    tree = tree_of((0, "context", 4), (1, "draw", 2), (2, "context", 1), (3, "draw", 3), (2, "draw", 3))
    first, second = cut_tree(tree, 10)
    assert first.nodes == tree.nodes[:4]
    assert [node.sampled for node in second.nodes] == [False, False, True]
    assert second.leaf_of_call == {96: 2}
    assert second.nodes[1].token_ids == tree.nodes[1].token_ids
    assert second.nodes[1].continues_id == tree.nodes[1].call_id


def test_a_cut_goes_where_little_stands_before_it_rather_than_where_the_budget_is_full() -> None:
    tree = tree_of((0, "context", 1), (1, "draw", 3), (1, "context", 6), (2, "draw", 2), (2, "draw", 2))
    assert [piece.num_tokens for piece in cut_tree(tree, 12)] == [4, 11]


def test_roots_without_a_common_token_are_parted_for_nothing() -> None:
    tree = tree_of((0, "context", 2), (1, "draw", 2), (0, "context", 1), (1, "draw", 3))
    assert [piece.num_tokens for piece in cut_tree(tree, 4)] == [4, 4]


def test_empty_draws_at_the_end_stand_in_no_piece_and_one_on_the_way_stays() -> None:
    tree = tree_of((0, "context", 3), (1, "draw", 0), (2, "context", 1), (3, "draw", 2), (1, "draw", 0), (1, "draw", 3))
    first, second = cut_tree(tree, 6)
    assert first.leaf_of_call.keys() == {99, 97}
    assert second.leaf_of_call.keys() == {95}


def test_a_tree_of_nothing_but_empty_draws_over_the_budget_has_no_piece() -> None:
    tree = tree_of((0, "context", 3), (1, "draw", 0), (0, "context", 3), (1, "draw", 0))
    assert cut_tree(tree, 3) == ()


def test_a_call_that_fits_nowhere_is_to_be_refused_first() -> None:
    tree = tree_of((0, "context", 4), (1, "draw", 3), (1, "draw", 2))
    with pytest.raises(AssertionError, match=r"rollout r: node 1 ends over the budget of 6 tokens"):
        cut_tree(tree, 6)
    fitting, refused = refuse_long_paths(tree, 6)
    assert refused == (99,)
    assert cut_tree(fitting, 6) == (fitting,)


def test_nothing_is_left_where_every_call_is_too_long() -> None:
    tree = tree_of((0, "context", 4), (1, "draw", 3))
    fitting, refused = refuse_long_paths(tree, 5)
    assert (fitting.nodes, fitting.leaf_of_call, refused) == ((), {}, (99,))


def test_a_rollout_that_forks_at_every_turn_is_cut_into_pieces_that_are_nearly_full() -> None:
    """As OpenClaw does it: 300 calls, each of which forks from the one before."""
    rng = random.Random(0)
    outline: list[tuple[int, str, int]] = [(0, "context", 500)]
    for turn in range(300):
        outline += [(turn + 1, "context", rng.randint(5, 20)), (turn + 2, "draw", rng.randint(20, 90))]
    tree = tree_of(*outline)
    pieces = cut_tree(tree, 8000)
    assert draws(*pieces) == draws(tree)
    assert max(piece.num_tokens for piece in pieces) <= 8000
    assert all(sum(piece.num_tokens for piece in pair) > 8000 for pair in pairwise(pieces))


def main_and_helper() -> CallTree:
    """The main loop draws 3 and 4 tokens, a subagent in between draws 20."""
    session = Session()
    first = session.call((1, 2, 3), reply=(7, 7, 7))
    session.call((1, 8), reply=tuple(range(20)), role=CallRole.SUBAGENT)
    session.call((1, 2, 3), first, (5,), reply=(6, 6, 6, 6))
    return build_tree("r", session.calls)


def test_each_role_is_a_tree_of_its_own_with_its_draws_alone() -> None:
    found = {tree.nodes[tree.draws[0].node_id].role: tree for tree in split_roles(main_and_helper())}
    assert {role: sorted(tree.leaf_of_call) for role, tree in found.items()} == {
        CallRole.MAIN: [0, 2],
        CallRole.SUBAGENT: [1],
    }
    assert [found[CallRole.MAIN].num_tokens, found[CallRole.SUBAGENT].num_tokens] == [3 + 3 + 1 + 4, 2 + 20]


def test_a_role_that_is_too_large_is_refused_while_the_other_stays() -> None:
    tree = main_and_helper()
    fitting, refused = refuse_large_roles(tree, budget=11)
    assert (sorted(fitting.leaf_of_call), refused) == ([0, 2], (1,))
    assert refuse_large_roles(tree, budget=22) == (tree, ())
