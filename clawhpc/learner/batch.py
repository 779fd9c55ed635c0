"""Pack the trees of a step into rows in which every token stands once.

A row is a forest in preorder, of siblings the largest first. Trees that share a row share their context too: tokens
that follow equal tokens, without a draw in between, stand once, so the long prompt head that all rollouts of a harness
have in common is computed once per row, forward and backward. Draws are never merged: each is its own, even where two
drew the same ids (law 2).

What is known of each draw, such as its advantage, is kept apart from the rows, in `Draws`: rows say where a token
stands, and which of the step's draws it is.

Shapes: B rows (always 1), T tokens of the row, N tokens of the row that train, M tokens of the step that train.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from clawhpc.learner.attention import Segment, TreeLayout
from clawhpc.learner.losses import Paths
from clawhpc.tree.conversation import conversation_paths, conversation_turns
from clawhpc.tree.cut import cut_tree
from clawhpc.tree.merge import Run, merge_trees
from clawhpc.tree.nodes import CallTree


@dataclass(frozen=True, kw_only=True)
class StepTree:
    """One rollout's tree, or a piece of it, in its step: every sampled token of it trains."""

    tree: CallTree
    draw_of_call: Mapping[int, int]
    """call_id -> which of the step's draws the first token of its reply is."""

    @classmethod
    def of(cls, tree: CallTree, first_draw: int) -> StepTree:
        """With the draws of the tree, in the order of `CallTree.draws`, from `first_draw` on."""
        starts = {tree.nodes[draw.node_id].call_id: first_draw + draw.start for draw in tree.draws}
        return cls(tree=tree, draw_of_call={call_id: start for call_id, start in starts.items() if call_id is not None})


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    """One packed row."""

    input_ids_BT: Tensor
    positions_BT: Tensor
    """Tokens before this one on its path."""
    trained_N: Tensor
    """Where in the row the tokens stand that were drawn here and train, in order."""
    predecessor_N: Tensor
    """Where the token before each of these on its path stands, whose hidden state predicts it."""
    draw_N: Tensor
    """Which of the step's M draws each of these is."""
    layout: TreeLayout
    temperature: float = 1.0
    """At which its tokens were drawn."""
    paths: Paths | None = None
    """The conversation paths through its N tokens, where the loss asks for them."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids_BT.shape[1]

    @property
    def targets_N(self) -> Tensor:
        """The ids that were drawn."""
        return self.input_ids_BT[0, self.trained_N]

    def to(self, device: torch.device | str) -> TreeBatch:
        """The same row with its tensors on `device`."""
        return _moved(self, device)

    @classmethod
    def empty(cls) -> TreeBatch:
        """A row that trains nothing, for a rank that has no other."""
        nothing_N = torch.zeros(0, dtype=torch.long)
        token_BT = torch.zeros(1, 1, dtype=torch.long)
        return cls(
            input_ids_BT=token_BT,
            positions_BT=token_BT,
            trained_N=nothing_N,
            predecessor_N=nothing_N,
            draw_N=nothing_N,
            layout=TreeLayout.chain(1),
            paths=Paths(path_K=nothing_N, token_K=nothing_N, num_paths=0),
        )


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What is known of each token of a step that trains; (M,) tensors, in the step's order."""

    sampling_logprobs: Tensor
    """By the engine when it was drawn."""
    token_weight: Tensor
    """In the loss, already divided by the denominator of the whole step (law 3); 0 for one that must not train."""
    advantages: Tensor
    rewards: Tensor | None = None
    """Of the rollout that drew it; None where nothing has a reward."""
    returns: Tensor | None = None
    """What the critic should have said."""
    old_values: Tensor | None = None
    """What it said before the update."""
    old_logprobs: Tensor | None = None
    """By the policy before the update."""
    reference_logprobs: Tensor | None = None
    """By the policy that the run began with."""
    harness: Tensor | None = None
    """In which it was drawn: its number among `StepBatch.harnesses`; None where they are not told apart."""

    def __len__(self) -> int:
        return len(self.sampling_logprobs)

    def at(self, index_N: Tensor) -> Draws:
        """Those of one row, (N,)."""
        return dataclasses.replace(self, **{name: value[index_N] for name, value in _tensors(self)})

    def to(self, device: torch.device | str) -> Draws:
        """The same with its tensors on `device`."""
        return _moved(self, device)


Movable = TypeVar("Movable", TreeBatch, Draws, Paths)


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    for field in dataclasses.fields(value):
        tensor = getattr(value, field.name)
        if isinstance(tensor, Tensor):
            yield field.name, tensor


def _moved(value: Movable, device: torch.device | str) -> Movable:
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in _tensors(value)}
    if isinstance(value, TreeBatch) and value.paths is not None:
        moved["paths"] = _moved(value.paths, device)
    return dataclasses.replace(value, **moved)


def build_batches(
    trees: Sequence[StepTree], *, token_budget: int, temperature: float = 1.0, with_paths: bool = False
) -> list[TreeBatch]:
    """The rows of a step, each within `token_budget`, as every path by itself must be.

    A tree over the budget is cut at forks, its trunk repeated; with `with_paths` none may be over it. Rows are filled
    in order, so neighbours should be rollouts of one group, which share the most.
    """
    rows: list[list[StepTree]] = []
    filled = _Size()
    for step_tree in trees:
        assert not with_paths or step_tree.tree.num_tokens <= token_budget, "one ratio per path needs all of it at once"
        for piece in cut_tree(step_tree.tree, token_budget):
            size = _Size.of(piece)
            if rows and (filled | size).num_tokens <= token_budget:
                rows[-1].append(dataclasses.replace(step_tree, tree=piece))
                filled |= size
            else:
                rows.append([dataclasses.replace(step_tree, tree=piece)])
                filled = size
    return [pack_row(row, temperature, with_paths=with_paths) for row in rows]


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


def pack_row(trees: Sequence[StepTree], temperature: float = 1.0, *, with_paths: bool = False) -> TreeBatch:
    """All of `trees`, which were drawn at `temperature`, as one row."""
    runs = merge_trees([tree.tree for tree in trees])
    stops = list(itertools.accumulate(len(run.token_ids) for run in runs))
    drawn = [(run, stop) for run, stop in zip(runs, stops, strict=True) if run.tree is not None]
    trained = [row for run, stop in drawn for row in range(stop - len(run.token_ids), stop)]
    row = TreeBatch(
        input_ids_BT=_integers(token for run in runs for token in run.token_ids)[None],
        positions_BT=_integers(at for run in runs for at in range(run.start, run.start + len(run.token_ids)))[None],
        trained_N=_integers(trained),
        predecessor_N=_integers(row for run, stop in drawn for row in _predecessors(run, stop, stops)),
        draw_N=_integers(draw for run, _ in drawn for draw in _draws(run, trees)),
        layout=TreeLayout(tuple(_segments(runs, stops))),
        temperature=temperature,
    )
    return dataclasses.replace(row, paths=_paths(trees, row.draw_N)) if with_paths else row


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long)


def _predecessors(run: Run, stop: int, stops: Sequence[int]) -> Iterator[int]:
    """Of the tokens of a draw; a draw at a root has none for its first token, and no model can have drawn it."""
    assert run.parent is not None, "a draw follows a prompt"
    yield stops[run.parent] - 1
    yield from range(stop - len(run.token_ids), stop - 1)


def _draws(run: Run, trees: Sequence[StepTree]) -> range:
    assert run.tree is not None, "of a draw"
    assert run.call_id is not None, "of a draw"
    first = trees[run.tree].draw_of_call[run.call_id]
    return range(first, first + len(run.token_ids))


def _paths(trees: Sequence[StepTree], draw_N: Tensor) -> Paths:
    """The conversation paths of whole trees that have tokens, over the row's trained tokens."""
    token_of_draw = {draw: token for token, draw in enumerate(draw_N.tolist())}
    paths: list[list[int]] = []
    for tree in trees:
        turns = conversation_turns(tree.tree)
        for path in conversation_paths(turns):
            firsts = ((tree.draw_of_call[turns[at].call_id], turns[at].stop - turns[at].start) for at in path)
            paths.append([token_of_draw[draw] for first, length in firsts for draw in range(first, first + length)])
    paths = [path for path in paths if path]
    return Paths(
        path_K=_integers(number for number, path in enumerate(paths) for _ in path),
        token_K=_integers(token for path in paths for token in path),
        num_paths=len(paths),
    )


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
