"""Fit a tree into rows of a token budget: cut it at forks, refuse what fits into no row, and change nothing else.

        trunk ─┬─ A        budget: trunk + 2        trunk ─┬─ A        trunk ─── C
               ├─ B                  ──▶                   └─ B
               └─ C

The trunk is repeated in every piece, where a draw that an earlier piece has already is context: each draw trains once,
after exactly the tokens that it was drawn after, so loss and gradient are those of the whole tree (law 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from clawhpc.records import CallRole
from clawhpc.tree.nodes import CallTree, Node


def refuse_long_paths(tree: CallTree, budget: int) -> tuple[CallTree, tuple[int, ...]]:
    """The tree without the calls whose prompt and completion have more than `budget` tokens, and their call_ids.

    What led to them alone goes with them; that may be all. `tree` itself where every call fits.
    """
    return _without(tree, lambda node: node.end > budget)


def refuse_large_roles(tree: CallTree, budget: int) -> tuple[CallTree, tuple[int, ...]]:
    """The same for all calls of a role that take more than `budget` tokens together, whatever the other roles take."""
    large = {part.nodes[part.draws[0].node_id].role for part in split_roles(tree) if part.num_tokens > budget}
    return _without(tree, lambda node: node.role in large)


def split_roles(tree: CallTree) -> tuple[CallTree, ...]:
    """The draws of each role as a tree of their own, in which those of other roles are context."""
    of_role: defaultdict[CallRole, set[int]] = defaultdict(set)
    for draw in tree.draws:
        of_role[tree.nodes[draw.node_id].role].add(draw.node_id)
    on_paths = [(_on_paths(tree, draws), draws) for draws in of_role.values()]
    return tuple(_subtree(tree, kept, repeated=kept - draws) for kept, draws in on_paths)


def _without(tree: CallTree, refuses: Callable[[Node], bool]) -> tuple[CallTree, tuple[int, ...]]:
    refused = {call_id: leaf for call_id, leaf in tree.leaf_of_call.items() if refuses(tree.nodes[leaf])}
    if not refused:
        return tree, ()
    fitting = (leaf for call_id, leaf in tree.leaf_of_call.items() if call_id not in refused)
    return _subtree(tree, _on_paths(tree, fitting), repeated=set(refused.values())), tuple(refused)


def cut_tree(tree: CallTree, budget: int) -> tuple[CallTree, ...]:
    """Trees of at most `budget` tokens each, in which every draw that has tokens is sampled in exactly one.

    Only tokens that a draw needs stand in them, and an empty draw that leads to no other stands in none. Their draws,
    piece after piece, are those of the tree in its order. Of all cuts that keep this order, this one repeats the fewest
    tokens, and of those it has the fewest pieces; so it is never more than each path by itself. `(tree,)` where the
    tree fits. Every call must fit: see `refuse_long_paths`.
    """
    if tree.num_tokens <= budget:
        return (tree,)
    leaves = _last_draws(tree)
    pieces: list[CallTree] = []
    earlier: set[int] = set()
    for start, stop in _best_cuts(tree, leaves, budget):
        kept = _on_paths(tree, leaves[start:stop])
        pieces.append(_subtree(tree, kept, repeated=earlier))
        earlier |= kept
    return tuple(pieces)


def _last_draws(tree: CallTree) -> list[int]:
    """The draws with tokens that lead to no other, in preorder."""
    draws = [node.node_id for node in tree.nodes if node.sampled and node.token_ids]
    followed = {before for before, draw in pairwise(draws) if before in tree.path(draw)}
    return [draw for draw in draws if draw not in followed]


def _best_cuts(tree: CallTree, leaves: Sequence[int], budget: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the leaves of each piece, in order: the ends of a shortest way through all places to cut."""
    trunks = [_trunk(tree, before, leaf) for before, leaf in pairwise((-1, *leaves))]
    new = (tree.nodes[leaf].end - trunk for leaf, trunk in zip(leaves, trunks, strict=True))
    sizes = [0, *accumulate(new)]
    best = [(0, 0, 0)]
    """Of the first k leaves: tokens repeated, pieces, and where the last piece starts."""
    for stop in range(1, len(leaves) + 1):
        fitting = [start for start in range(stop) if trunks[start] + sizes[stop] - sizes[start] <= budget]
        assert fitting, f"rollout {tree.rollout_id}: node {leaves[stop - 1]} ends over the budget of {budget} tokens"
        best.append(min((best[start][0] + trunks[start], best[start][1] + 1, start) for start in fitting))
    cuts = [len(leaves)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][2])
    return pairwise(reversed(cuts))


def _trunk(tree: CallTree, before: int, leaf: int) -> int:
    """How many tokens the path to `leaf` shares with that to `before`, the leaf that precedes it."""
    return next(tree.nodes[step].start for step in tree.path(leaf) if step > before)


def _on_paths(tree: CallTree, ends: Iterable[int]) -> set[int]:
    return {step for end in ends for step in tree.path(end)}


def _subtree(tree: CallTree, kept: Collection[int], *, repeated: Collection[int] = ()) -> CallTree:
    """The nodes `kept`, which are whole paths from a root; draws that are `repeated` as context."""
    new_ids = {old: new for new, old in enumerate(sorted(kept))}
    nodes = []
    for old, new in new_ids.items():
        node = _as_context(tree.nodes[old]) if old in repeated else tree.nodes[old]
        parent_id = None if node.parent_id is None else new_ids[node.parent_id]
        nodes.append(replace(node, node_id=new, parent_id=parent_id))
    leaf_of_call = {node.call_id: node.node_id for node in nodes if node.call_id is not None}
    return CallTree(rollout_id=tree.rollout_id, nodes=tuple(nodes), leaf_of_call=leaf_of_call)


def _as_context(node: Node) -> Node:
    """A draw as a copy of itself that does not train."""
    if not node.sampled:
        return node
    return replace(
        node, sampled=False, sampling_logprobs=(), weight_versions=(), call_id=None, continues_id=node.call_id
    )
