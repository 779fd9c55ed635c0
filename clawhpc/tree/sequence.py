"""A plain sequence of tokens as a tree."""

from __future__ import annotations

from collections.abc import Sequence

from clawhpc.records import VersionSpan
from clawhpc.tree.nodes import CallTree, Node


def sequence_tree(name: str, token_ids: Sequence[int], trained: Sequence[bool]) -> CallTree:
    """One plain sequence as a tree without forks: runs of `trained` tokens are its draws (for imitation only)."""
    nodes: list[Node] = []
    start = 0
    for stop in range(1, len(token_ids) + 1):
        if stop == len(token_ids) or trained[stop] != trained[start]:
            nodes.append(_sequence_node(len(nodes), start, tuple(token_ids[start:stop]), trained[start]))
            start = stop
    leaf_of_call = {node.call_id: node.node_id for node in nodes if node.call_id is not None}
    return CallTree(rollout_id=name, nodes=tuple(nodes), leaf_of_call=leaf_of_call)


def _sequence_node(node_id: int, start: int, token_ids: tuple[int, ...], trained: bool) -> Node:
    length = len(token_ids)
    return Node(
        node_id=node_id,
        parent_id=node_id - 1 if node_id else None,
        start=start,
        token_ids=token_ids,
        sampled=trained,
        sampling_logprobs=(0.0,) * length if trained else (),
        weight_versions=(VersionSpan(version=0, start=0, end=length),) if trained else (),
        call_id=node_id if trained else None,
    )
