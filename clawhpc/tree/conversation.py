"""How the draws of a tree continue one another, whatever the harness did to the prompts between them.

Paths of the tree say which tokens a draw was conditioned on. A harness that moves its last message forks at every turn,
so there each draw is a leaf, and a later history repeats it as a grafted copy on another branch:

    tree    head ─┬─ moving ── [a]                    conversation    a ── b ── c
                  └─ a' ── result ─┬─ moving ── [b]
                                   └─ b' ── result ── moving ── [c]

What came of a draw is told by its conversation: credit flows from each draw to those that its history contains, drawn
at their place or copied. Roles are kept apart: a summary that was asked of the main loop is no continuation of it, so
the turns of a role are the same whatever other roles train.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clawhpc.records import CallRole
from clawhpc.tree.nodes import CallTree, Node


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One draw of a tree in its conversation; one without tokens is a turn too."""

    call_id: int
    role: CallRole
    parent: int | None
    """Index of the turn that it continues, which comes before it; None where a conversation begins."""
    start: int
    """Its tokens are `start` to `stop` of the tree's draws in their flat order (`CallTree.draws`)."""
    stop: int


def conversation_turns(tree: CallTree) -> tuple[Turn, ...]:
    """One turn for each sampled node, in the order of their calls, so that what a turn continues comes before it.

    A turn continues the last reply in its history that is of its own role and trains; others are looked through. A
    reply that histories repeat only before that one ends a conversation. So does an empty one that is repeated
    elsewhere than where it was drawn, for its copy leaves no trace in the tree.
    """
    node_of_call = tree.leaf_of_call
    spans = {draw.node_id: (draw.start, draw.stop) for draw in tree.draws}
    index_of_call = {call_id: index for index, call_id in enumerate(sorted(node_of_call))}
    turns: list[Turn] = []
    for call_id, index in index_of_call.items():
        node = tree.nodes[node_of_call[call_id]]
        heard = (tree.nodes[node_of_call[reply]] for reply in _replies_before(tree, node) if reply in node_of_call)
        continued = next((other.call_id for other in heard if other.role == node.role), None)
        parent = None if continued is None else index_of_call[continued]
        assert parent is None or parent < index, f"call {call_id} repeats call {continued}, which came later"
        start, stop = spans[node.node_id]
        turns.append(Turn(call_id=call_id, role=node.role, parent=parent, start=start, stop=stop))
    return tuple(turns)


def conversation_paths(turns: Sequence[Turn]) -> tuple[tuple[int, ...], ...]:
    """The walks from where a conversation begins to each of its ends, as indices into `turns`."""
    continued = {turn.parent for turn in turns}
    return tuple(_walk(turns, last) for last in range(len(turns)) if last not in continued)


def _replies_before(tree: CallTree, node: Node) -> Iterator[int]:
    """The calls whose replies stand before a node on its path, drawn there or copied; the nearest first."""
    while node.parent_id is not None:
        node = tree.nodes[node.parent_id]
        reply = node.call_id if node.sampled else node.continues_id
        if reply is not None:
            yield reply


def _walk(turns: Sequence[Turn], last: int) -> tuple[int, ...]:
    walk, at = [last], turns[last].parent
    while at is not None:
        walk.append(at)
        at = turns[at].parent
    return tuple(reversed(walk))
