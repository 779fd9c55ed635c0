"""The prefix tree of one rollout (tree -> learner, view)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from clawhpc.records import CallRole, VersionSpan


@dataclass(frozen=True, kw_only=True)
class Node:
    """A run of tokens that every path through it shares: one call's draw, or context."""

    node_id: int
    """Position in `CallTree.nodes`."""
    parent_id: int | None
    """None for a root; calls that share not even their first token have roots of their own."""
    start: int
    """Tokens before this node on its path: the position of its first token."""
    token_ids: tuple[int, ...]
    """Empty only for an empty completion."""
    sampled: bool
    """These tokens were drawn at this place; all other tokens are context."""
    sampling_logprobs: tuple[float, ...] = ()
    """Aligned with `token_ids` when sampled, else empty."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """Covers `token_ids` when sampled, else empty."""
    call_id: int | None = None
    """Of a sampled node: the call that drew it."""
    role: CallRole = CallRole.MAIN
    """Of a sampled node: what that call was made for. Says nothing of context."""
    continues_id: int | None = None
    """Of a grafted copy: the call whose reply it repeats; None for all other nodes."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


class Draw(NamedTuple):
    """Where the tokens of one sampled node stand among all that were drawn in its tree."""

    node_id: int
    start: int
    stop: int
    """One past the last; `start` for an empty completion."""


@dataclass(frozen=True, kw_only=True)
class CallTree:
    """The prefix tree of one rollout. Node i is `nodes[i]`; parents come before children, a subtree is contiguous."""

    rollout_id: str
    nodes: tuple[Node, ...]
    """In preorder."""
    leaf_of_call: dict[int, int]
    """call_id -> node_id of its completion: a leaf, or an inner node where a later call extends it."""

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Aligned with `nodes`: the node_ids of each node's children, in order."""
        children: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            if node.parent_id is not None:
                children[node.parent_id].append(node.node_id)
        return tuple(map(tuple, children))

    @cached_property
    def draws(self) -> tuple[Draw, ...]:
        """The sampled nodes in preorder, empty ones included: the flat order of all tokens that were drawn."""
        sampled = [node for node in self.nodes if node.sampled]
        ends = accumulate((len(node.token_ids) for node in sampled), initial=0)
        return tuple(Draw(node.node_id, *span) for node, span in zip(sampled, pairwise(ends), strict=True))

    @property
    def leaves(self) -> tuple[int, ...]:
        """The node_ids without children, in preorder: one per root-to-leaf path."""
        return tuple(node.node_id for node in self.nodes if not self.children[node.node_id])

    @property
    def num_tokens(self) -> int:
        """Tokens in the tree, each shared one counted once."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that were drawn, each counted once."""
        return sum(len(node.token_ids) for node in self.nodes if node.sampled)

    def path(self, node_id: int) -> tuple[int, ...]:
        """The node_ids from the root to `node_id`, both included."""
        walk = [node_id]
        while (parent_id := self.nodes[walk[-1]].parent_id) is not None:
            walk.append(parent_id)
        return tuple(reversed(walk))

    def path_token_ids(self, node_id: int) -> tuple[int, ...]:
        """The tokens from the root to the end of `node_id`; for `leaf_of_call[c]`, call c's prompt and completion."""
        return tuple(token for step in self.path(node_id) for token in self.nodes[step].token_ids)
