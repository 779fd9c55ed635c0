"""Pack the trees of a step into rows in which every token stands once.

A row is a forest in preorder. Trees that share a row share their context too: tokens that follow equal tokens, without
a draw in between, stand once, so the long prompt head that all rollouts of a harness have in common is computed once
per row, forward and backward. Draws are never merged: each is its own, even where two drew the same ids (law 2).

Shapes: B rows (always 1), T tokens of the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clawhpc.learner.attention import Segment, TreeLayout
from clawhpc.tree.nodes import CallTree, Node
from clawhpc.tree.prefix import shared_length


@dataclass(frozen=True, kw_only=True)
class CreditedTree:
    """One rollout as the loss sees it: every sampled token of `tree` trains, with one advantage and one weight."""

    tree: CallTree
    rollout: int
    """Index of the rollout in its step."""
    advantage: float
    token_weight: float
    """Of each sampled token in the loss, already divided by the denominator of the whole step (law 3)."""


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    """One packed row. Tensors are (B, T) and aligned with `input_ids_BT`; what is said of draws is 0 on context."""

    input_ids_BT: Tensor
    positions_BT: Tensor
    """Tokens before this one on its path."""
    predecessor_BT: Tensor
    """Row of the token before this one on its path, whose hidden state predicts it; -1 at a root."""
    sampled_BT: Tensor
    """True where a token was drawn here: these train."""
    sampling_logprobs_BT: Tensor
    advantages_BT: Tensor
    token_weight_BT: Tensor
    """The loss is the sum over sampled tokens of this times their term, over all rows of the step."""
    weight_version_BT: Tensor
    """Policy step whose weights drew the token; -1 on context."""
    rollout_BT: Tensor
    """Index in the step of the rollout that drew the token; -1 on context, which rollouts may share."""
    layout: TreeLayout
    temperature: float = 1.0
    """At which its tokens were drawn."""
    old_logprobs_BT: Tensor | None = None
    """By the policy before the update; None until they have been computed."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids_BT.shape[1]

    def to(self, device: torch.device | str) -> TreeBatch:
        """The same row with its tensors on `device`."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        moved: dict[str, Any] = {name: value.to(device) for name, value in values if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)


def build_batches(trees: Sequence[CreditedTree], *, token_budget: int, temperature: float = 1.0) -> list[TreeBatch]:
    """The rows of a step, each within `token_budget`, as every tree by itself must be.

    Rows are filled in order, so neighbours should be rollouts of one group, which share the most.
    """
    rows: list[list[CreditedTree]] = []
    filled = _Size()
    for tree in trees:
        size = _Size.of(tree.tree)
        assert size.num_tokens <= token_budget, "larger ones have no weight, which was shared out before"
        if rows and (filled | size).num_tokens <= token_budget:
            rows[-1].append(tree)
            filled |= size
        else:
            rows.append([tree])
            filled = size
    return [pack_row(row, temperature) for row in rows]


@dataclass(frozen=True)
class _Size:
    """How many tokens trees take in one row."""

    shareable: frozenset[int] = frozenset()
    """A number for each context token with no draw before it, equal for equal tokens after equal tokens."""
    private: int = 0
    """All other tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.shareable) + self.private

    def __or__(self, other: _Size) -> _Size:
        return _Size(self.shareable | other.shareable, self.private + other.private)

    @classmethod
    def of(cls, tree: CallTree) -> _Size:
        shareable: set[int] = set()
        private = 0
        mark_after: dict[int | None, int | None] = {None: 0}
        for node in tree.nodes:
            mark = None if node.sampled else mark_after[node.parent_id]
            if mark is None:
                private += len(node.token_ids)
            else:
                for token in node.token_ids:
                    mark = hash((mark, token))
                    shareable.add(mark)
            mark_after[node.node_id] = mark
        return cls(frozenset(shareable), private)


def pack_row(trees: Sequence[CreditedTree], temperature: float = 1.0) -> TreeBatch:
    """All of `trees`, which were drawn at `temperature`, as one row."""
    runs = merge_trees([tree.tree for tree in trees])
    lengths = torch.tensor([len(run.token_ids) for run in runs], dtype=torch.long)
    stops = lengths.cumsum(0).tolist()
    drawn = [None if run.tree is None else trees[run.tree] for run in runs]

    def per_run(values: list[float]) -> Tensor:
        return torch.tensor(values).repeat_interleave(lengths)[None]

    def per_token(values: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for run in values for value in run], dtype=dtype)[None]

    predecessors = [
        [-1 if run.parent is None else stops[run.parent] - 1, *range(stop - len(run.token_ids), stop - 1)]
        for run, stop in zip(runs, stops, strict=True)
    ]
    return TreeBatch(
        input_ids_BT=per_token((run.token_ids for run in runs), torch.long),
        positions_BT=per_token((range(run.start, run.start + len(run.token_ids)) for run in runs), torch.long),
        predecessor_BT=per_token(predecessors, torch.long),
        sampled_BT=per_run([run.tree is not None for run in runs]),
        sampling_logprobs_BT=per_token((run.sampling_logprobs for run in runs), torch.float32),
        advantages_BT=per_run([tree.advantage if tree else 0.0 for tree in drawn]),
        token_weight_BT=per_run([tree.token_weight if tree else 0.0 for tree in drawn]),
        weight_version_BT=per_token((run.weight_versions for run in runs), torch.long),
        rollout_BT=per_run([tree.rollout if tree else -1 for tree in drawn]),
        layout=TreeLayout(tuple(_segments(runs, stops))),
        temperature=temperature,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of tokens of the merged forest, not empty."""

    parent: int | None
    """Index among the runs."""
    start: int
    """Tokens before it on its path."""
    token_ids: tuple[int, ...]
    tree: int | None
    """Index of the tree whose draw this is; None for context."""
    sampling_logprobs: tuple[float, ...]
    """Aligned with `token_ids`; zeros on context."""
    weight_versions: tuple[int, ...]
    """Aligned with `token_ids`; -1 on context."""


def merge_trees(trees: Sequence[CallTree]) -> list[Run]:
    """The trees as one forest in preorder, equal context after equal history standing once, every draw by itself."""
    runs: list[Run] = []
    roots = [_Cursor(trees, index, node) for index, tree in enumerate(trees) for node in tree.nodes if _is_root(node)]
    stack: list[tuple[int | None, list[_Cursor]]] = [(None, group) for group in reversed(_group(roots))]
    while stack:
        parent, group = stack.pop()
        rests = [cursor.rest for cursor in group]
        length = shared_length(min(rests), max(rests))  # what the first and the last in order share, all between share
        runs.append(group[0].run(parent, length))
        below = _group(step for cursor in group for step in cursor.advance(length))
        stack.extend((len(runs) - 1, siblings) for siblings in reversed(below))
    return runs


@dataclass(frozen=True)
class _Cursor:
    """A place in one of the trees: the tokens of `node` from `offset` on come next."""

    trees: Sequence[CallTree]
    tree: int
    node: Node
    offset: int = 0

    @property
    def rest(self) -> tuple[int, ...]:
        return self.node.token_ids[self.offset :]

    def advance(self, length: int) -> Iterator[_Cursor]:
        """The places that come after `length` more tokens."""
        if self.offset + length < len(self.node.token_ids):
            yield dataclasses.replace(self, offset=self.offset + length)
        else:
            yield from self.below()

    def below(self) -> Iterator[_Cursor]:
        for child in self.trees[self.tree].children[self.node.node_id]:
            yield _Cursor(self.trees, self.tree, self.trees[self.tree].nodes[child])

    def run(self, parent: int | None, length: int) -> Run:
        node = self.node
        versions = [version.version for version in node.weight_versions for _ in range(version.start, version.end)]
        return Run(
            parent=parent,
            start=node.start + self.offset,
            token_ids=self.rest[:length],
            tree=self.tree if node.sampled else None,
            sampling_logprobs=node.sampling_logprobs if node.sampled else (0.0,) * length,
            weight_versions=tuple(versions) if node.sampled else (-1,) * length,
        )


def _is_root(node: Node) -> bool:
    return node.parent_id is None


def _group(cursors: Iterable[_Cursor]) -> list[list[_Cursor]]:
    """Siblings that become one run: context by its next token, each draw alone, children in place of an empty draw."""
    groups: dict[object, list[_Cursor]] = {}
    waiting = list(cursors)[::-1]
    while waiting:
        cursor = waiting.pop()
        if not cursor.rest:
            waiting.extend(reversed(list(cursor.below())))
        elif cursor.node.sampled:
            groups[cursor.tree, cursor.node.node_id] = [cursor]
        else:
            groups.setdefault(cursor.rest[0], []).append(cursor)
    return list(groups.values())


def _segments(runs: Sequence[Run], stops: Sequence[int]) -> Iterator[Segment]:
    """Runs joined wherever there is no fork between them."""
    num_children = [0] * len(runs)
    ends = list(stops)
    for index in reversed(range(len(runs))):
        if (parent := runs[index].parent) is not None:
            num_children[parent] += 1
            ends[parent] = max(ends[parent], ends[index])
    start = 0
    for index, stop in enumerate(stops):
        if num_children[index] != 1:
            yield Segment(start, stop, ends[index])
            start = stop
