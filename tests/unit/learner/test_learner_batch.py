import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.learner.batch import TreeBatch, _Size, build_batches
from clawhpc.tree.merge import merge_trees
from clawhpc.tree.nodes import CallTree
from tests.fakes.learner_trees import context, draw, forest, pack, plant, random_tree

HEAD = (1, 2, 3)


def row_path(row: TreeBatch, at: int) -> list[int]:
    """The tokens that `at` attends to, itself the last."""
    return row.input_ids_BT[0, row.layout.mask()[at]].tolist()


def test_a_common_head_stands_once_and_draws_of_equal_ids_stay_apart() -> None:
    trees = [plant(context(*HEAD, 7, below=[draw(5, 6)])), plant(context(*HEAD, 7, below=[draw(5, 6)]))]
    row = pack(trees)
    assert row.input_ids_BT.tolist() == [[*HEAD, 7, 5, 6, 5, 6]]
    assert row.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5]]
    assert row.trained_N.tolist() == [4, 5, 6, 7]
    assert row.predecessor_N.tolist() == [3, 4, 3, 6]
    assert row.targets_N.tolist() == [5, 6, 5, 6]
    assert row.draw_N.tolist() == [0, 1, 2, 3]


def test_heads_that_part_in_the_middle_of_a_node_share_what_they_have_in_common() -> None:
    trees = [plant(context(*HEAD, 7, 8, below=[draw(5)])), plant(context(*HEAD, 9, below=[draw(5)]))]
    row = pack(trees)
    assert row.input_ids_BT.tolist() == [[*HEAD, 7, 8, 5, 9, 5]]
    assert row.predecessor_N.tolist() == [4, 6]


def test_a_head_that_is_the_whole_of_another_context_is_shared() -> None:
    trees = [plant(context(*HEAD, below=[draw(5)])), plant(context(*HEAD, 4, below=[draw(6)]))]
    assert pack(trees).input_ids_BT.tolist() == [[*HEAD, 4, 6, 5]]


def test_context_after_a_draw_is_not_shared() -> None:
    trees = [plant(context(1, below=[draw(2, below=[context(3, 4, below=[draw(5)])])])) for _ in range(2)]
    assert pack(trees).num_tokens == 1 + 2 * 4


def test_an_empty_draw_is_a_leaf_without_tokens() -> None:
    tree = plant(context(1, 2, below=[draw(), draw(3), draw(below=[context(4, below=[draw(5)])])]))
    row = pack([tree])
    assert row.input_ids_BT.tolist() == [[1, 2, 4, 5, 3]]
    assert row.predecessor_N.tolist() == [2, 1]


def test_of_siblings_the_one_with_the_most_tokens_below_it_comes_first() -> None:
    trunk = context(2, below=[draw(3), context(4, below=[draw(5), context(6, 7, below=[draw(8)])])])
    row = pack([plant(context(1, below=[draw(9), trunk]))])
    assert row.input_ids_BT.tolist() == [[1, 2, 4, 6, 7, 8, 5, 3, 9]]
    assert row.draw_N.tolist() == [3, 2, 1, 0]


def test_rows_stay_within_the_budget_with_shared_context_counted_once() -> None:
    trees = [plant(context(*HEAD, below=[draw(i, i)])) for i in range(5)]
    rows = build_batches(forest(trees).step_trees, token_budget=7)
    assert [row.num_tokens for row in rows] == [7, 7, 5]
    assert [row.draw_N.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


random_trees = st.lists(
    st.builds(random_tree, st.integers(0, 10_000), depth=st.integers(1, 5), head=st.sampled_from([HEAD, (1, 2), (9,)])),
    min_size=1,
    max_size=5,
)


@given(random_trees, st.integers(0, 60))
@settings(max_examples=50, deadline=None)
def test_every_draw_of_every_tree_trains_once_after_its_own_history(trees: list[CallTree], spare: int) -> None:
    longest = max((node.end for tree in trees for node in tree.nodes), default=0)
    rows = build_batches(forest(trees).step_trees, token_budget=longest + spare)
    histories = [
        list(tree.path_token_ids(draw.node_id)[: tree.nodes[draw.node_id].start + at + 1])
        for tree in trees
        for draw in tree.draws
        for at in range(draw.stop - draw.start)
    ]
    assert sorted(draw for row in rows for draw in row.draw_N.tolist()) == list(range(len(histories)))
    for row in rows:
        assert row.num_tokens <= longest + spare
        places = zip(row.draw_N.tolist(), row.trained_N.tolist(), row.predecessor_N.tolist(), strict=True)
        for number, at, before in places:
            assert row_path(row, at) == histories[number]
            assert row_path(row, before) == histories[number][:-1]
        assert all(len(row_path(row, at)) == int(row.positions_BT[0, at]) + 1 for at in range(row.num_tokens))


def test_the_paths_of_a_row_are_those_of_its_conversations() -> None:
    trees = [
        plant(context(1, below=[draw(2, 3, below=[context(4, below=[draw(5)]), context(6, below=[draw(7)])])])),
        plant(context(1, below=[draw(8), draw()])),
    ]
    (row,) = build_batches(forest(trees).step_trees, token_budget=99, with_paths=True)
    assert row.paths.num_paths == 3
    found = [[] for _ in range(3)]
    for path, token in zip(row.paths.path_K.tolist(), row.paths.token_K.tolist(), strict=True):
        found[path].append(row.targets_N[token].item())
    assert found == [[2, 3, 5], [2, 3, 7], [8]]


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
    (row,) = build_batches(forest([random_tree(0, depth=2)]).step_trees, token_budget=99, with_paths=True)
    moved = row.to("meta")
    assert moved.input_ids_BT.is_meta
    assert moved.layout == row.layout
    assert moved.paths.path_K.is_meta
    assert torch.equal(row.to("cpu").input_ids_BT, row.input_ids_BT)
