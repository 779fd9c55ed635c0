"""Root-to-leaf walks of a tree as plain sequences: the per-path computation that the tree's must equal (law 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clawhpc.tree.nodes import CallTree


@dataclass(frozen=True, kw_only=True)
class Path:
    """One root-to-leaf walk. All arrays have one entry per token of the walk."""

    leaf_id: int
    """The node_id at its end."""
    token_ids: NDArray[np.int64]
    node_ids: NDArray[np.int64]
    """The node that each token stands in; tokens of equal (node_id, position) on two paths are copies of one."""
    sampled: NDArray[np.bool_]
    """The tokens that train; all others are context."""
    weight: NDArray[np.float64]
    """1 / copies for a sampled token, so that the copies of a token weigh 1 together; 0 for context."""
    sampling_logprobs: NDArray[np.float64]
    """Where sampled; 0 elsewhere."""


def count_copies(tree: CallTree) -> tuple[int, ...]:
    """Aligned with `tree.nodes`: the number of root-to-leaf paths through each node."""
    copies = [0 if children else 1 for children in tree.children]
    for node in reversed(tree.nodes):
        if node.parent_id is not None:
            copies[node.parent_id] += copies[node.node_id]
    return tuple(copies)


def tree_paths(tree: CallTree) -> tuple[Path, ...]:
    """Every root-to-leaf path, in the order of the leaves."""
    copies = count_copies(tree)
    return tuple(_walk(tree, leaf_id, copies) for leaf_id in tree.leaves)


def _walk(tree: CallTree, leaf_id: int, copies: tuple[int, ...]) -> Path:
    nodes = [tree.nodes[node_id] for node_id in tree.path(leaf_id)]
    lengths = [len(node.token_ids) for node in nodes]
    weights = [1.0 / copies[node.node_id] if node.sampled else 0.0 for node in nodes]
    logprobs = [node.sampling_logprobs if node.sampled else (0.0,) * len(node.token_ids) for node in nodes]
    return Path(
        leaf_id=leaf_id,
        token_ids=np.array(tree.path_token_ids(leaf_id), dtype=np.int64),
        node_ids=np.repeat(np.array([node.node_id for node in nodes], dtype=np.int64), lengths),
        sampled=np.repeat(np.array([node.sampled for node in nodes], dtype=np.bool_), lengths),
        weight=np.repeat(np.array(weights, dtype=np.float64), lengths),
        sampling_logprobs=np.array([value for values in logprobs for value in values], dtype=np.float64),
    )
