import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.learner.batch import CreditedTree, TreeBatch, _Size, build_batches, merge_trees, pack_row
from clawhpc.tree.nodes import CallTree
from tests.fakes.learner_trees import context, credit, draw, plant, random_tree

HEAD = (1, 2, 3)


def row_path(row: TreeBatch, at: int) -> list[int]:
    """The tokens from the root to `at`, as the row's predecessors lead there."""
    walk = []
    while at >= 0:
        walk.append(int(row.input_ids_BT[0, at]))
        at = int(row.predecessor_BT[0, at])
    return walk[::-1]


def ancestors_by_layout(row: TreeBatch, at: int) -> list[int]:
    return row.input_ids_BT[0, row.layout.mask()[at]].tolist()


def test_a_common_head_stands_once_and_draws_of_equal_ids_stay_apart() -> None:
    trees = [plant(context(*HEAD, 7, below=[draw(5, 6)])), plant(context(*HEAD, 7, below=[draw(5, 6)]))]
    row = pack_row(credit(trees, [1.0, -1.0]))
    assert row.input_ids_BT.tolist() == [[*HEAD, 7, 5, 6, 5, 6]]
    assert row.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5]]
    assert row.predecessor_BT.tolist() == [[-1, 0, 1, 2, 3, 4, 3, 6]]
    assert row.sampled_BT.tolist() == [[False] * 4 + [True] * 4]
    assert row.advantages_BT.tolist() == [[0, 0, 0, 0, 1, 1, -1, -1]]
    assert row.rollout_BT.tolist() == [[-1, -1, -1, -1, 0, 0, 1, 1]]
    assert row.weight_version_BT.tolist() == [[-1, -1, -1, -1, 3, 3, 3, 3]]


def test_heads_that_part_in_the_middle_of_a_node_share_what_they_have_in_common() -> None:
    trees = [plant(context(*HEAD, 7, 8, below=[draw(5)])), plant(context(*HEAD, 9, below=[draw(5)]))]
    row = pack_row(credit(trees, [1.0, 1.0]))
    assert row.input_ids_BT.tolist() == [[*HEAD, 7, 8, 5, 9, 5]]
    assert row.predecessor_BT.tolist() == [[-1, 0, 1, 2, 3, 4, 2, 6]]


def test_a_head_that_is_the_whole_of_another_context_is_shared() -> None:
    trees = [plant(context(*HEAD, below=[draw(5)])), plant(context(*HEAD, 4, below=[draw(5)]))]
    assert pack_row(credit(trees, [1.0, 1.0])).input_ids_BT.tolist() == [[*HEAD, 5, 4, 5]]


def test_context_after_a_draw_is_not_shared() -> None:
    trees = [plant(context(1, below=[draw(2, below=[context(3, 4, below=[draw(5)])])])) for _ in range(2)]
    assert pack_row(credit(trees, [1.0, 1.0])).num_tokens == 1 + 2 * 4


def test_an_empty_draw_is_a_leaf_without_tokens() -> None:
    tree = plant(context(1, 2, below=[draw(), draw(3), draw(below=[context(4, below=[draw(5)])])]))
    row = pack_row(credit([tree], [1.0]))
    assert row.input_ids_BT.tolist() == [[1, 2, 3, 4, 5]]
    assert row.predecessor_BT.tolist() == [[-1, 0, 1, 1, 3]]


def test_rows_stay_within_the_budget_with_shared_context_counted_once() -> None:
    trees = [plant(context(*HEAD, below=[draw(i, i)])) for i in range(5)]
    rows = build_batches(credit(trees, [1.0] * 5), token_budget=7)
    assert [row.num_tokens for row in rows] == [7, 7, 5]
    assert [row.rollout_BT[row.sampled_BT].unique().tolist() for row in rows] == [[0, 1], [2, 3], [4]]


random_trees = st.lists(
    st.builds(random_tree, st.integers(0, 10_000), depth=st.integers(1, 5), head=st.sampled_from([HEAD, (1, 2), (9,)])),
    min_size=1,
    max_size=5,
)


@given(random_trees)
@settings(max_examples=30, deadline=None)
def test_every_draw_of_every_tree_stands_once_after_its_own_history(trees: list[CallTree]) -> None:
    row = pack_row(credit(trees, [1.0 + i for i in range(len(trees))]))
    expected = sorted(
        [index, *tree.path_token_ids(node.node_id)[: node.start + at + 1]]
        for index, tree in enumerate(trees)
        for node in tree.nodes
        if node.sampled
        for at in range(len(node.token_ids))
    )
    drawn = row.sampled_BT[0].nonzero()[:, 0].tolist()
    assert sorted([int(row.rollout_BT[0, at]), *row_path(row, at)] for at in drawn) == expected
    assert all(ancestors_by_layout(row, at) == row_path(row, at) for at in range(row.num_tokens))
    assert all(len(row_path(row, at)) == int(row.positions_BT[0, at]) + 1 for at in range(row.num_tokens))


@given(random_trees)
@settings(max_examples=30, deadline=None)
def test_the_size_that_rows_are_filled_by_is_their_size(trees: list[CallTree]) -> None:
    size = _Size()
    for tree in trees:
        size |= _Size.of(tree)
    num_tokens = sum(len(run.token_ids) for run in merge_trees(trees))
    assert size.num_tokens >= num_tokens
    if all(node.token_ids for tree in trees for node in tree.nodes):
        assert size.num_tokens == num_tokens


def test_a_row_moves_to_another_device_with_all_that_it_holds() -> None:
    row = pack_row([CreditedTree(tree=random_tree(0, depth=2), rollout=0, advantage=1.0, token_weight=0.5)])
    moved = row.to("meta")
    assert moved.input_ids_BT.is_meta
    assert moved.layout == row.layout
    assert moved.old_logprobs_BT is None
    assert torch.equal(row.to("cpu").input_ids_BT, row.input_ids_BT)
