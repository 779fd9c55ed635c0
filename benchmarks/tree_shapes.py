"""The trees that harnesses grow, with random tokens, and what others make of them: a row for each path, or for each call.

Lengths are those of real runs times a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from clawhpc.learner.batch import StepTree
from clawhpc.records import VersionSpan
from clawhpc.tree.nodes import CallTree, Node

VOCAB = 1152
REPLY = 150
"""Tokens that a model draws in a turn."""
RESULT = 450
"""Tokens that tools answer."""
SHARING = {0.5: (4, 3), 0.8: (8, 8), 0.9: (16, 16), 0.97: (40, 48)}
"""Of the two families of trees: how many rollouts of one prompt, how many turns that fork, give that sharing."""
EVERY_TURN = "a fork at every turn"
LONGEST = 24_000
"""Tokens of the longest path in these."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A step to compute."""

    name: str
    trees: tuple[CallTree, ...]

    @property
    def step_trees(self) -> list[StepTree]:
        """With the draws of all in one order."""
        made, first = [], 0
        for tree in self.trees:
            made.append(StepTree.of(tree, first))
            first += tree.num_sampled_tokens
        return made


def shapes(scale: float) -> Iterator[Shape]:
    """All that are measured."""
    grow = _Grower(scale)
    yield Shape(name="prefix of 24 k, 20 turns", trees=(grow.turns(),))
    yield Shape(name="8 rollouts of a 20 k prompt", trees=tuple(grow.rollouts(8, prompt=20_000, turns=10)))
    yield Shape(name=EVERY_TURN, trees=(grow.forks(20, prompt=12_000, step=REPLY + RESULT),))
    yield Shape(name="5 subagents", trees=(grow.subagents(),))
    yield Shape(name="no sharing", trees=tuple(grow.rollouts(4, prompt=0, turns=LONGEST // (REPLY + RESULT))))
    for sharing, (rollouts, turns) in SHARING.items():
        prompt = LONGEST * sharing * rollouts / (rollouts - 1)
        own = LONGEST - prompt
        yield Shape(
            name=f"{rollouts} rollouts of a prompt",
            trees=tuple(grow.rollouts(rollouts, prompt=prompt, turns=max(1, round(own / (REPLY + RESULT))), own=own)),
        )
        drawn = turns * REPLY
        prompt = 2 * ((LONGEST + drawn) / (1 - sharing) - LONGEST * (turns + 1) / 2 - drawn) / (turns - 1)
        step = (LONGEST - prompt) / turns
        yield Shape(name=f"{turns} turns that fork", trees=(grow.forks(turns, prompt=prompt, step=step),))


class _Grower:
    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._rng = torch.Generator().manual_seed(0)

    def turns(self) -> CallTree:
        tree = _Planter()
        self._converse(tree, self._context(tree, None, 24_000 - RESULT), 20)
        return tree.planted("turns")

    def rollouts(self, count: int, *, prompt: float, turns: int, own: float | None = None) -> Iterator[CallTree]:
        """With a prompt of their own where `prompt` is 0."""
        head = self._tokens(prompt)
        result = RESULT if own is None else own / turns - REPLY
        for number in range(count):
            tree = _Planter()
            root = tree.add(None, head, False) if prompt else self._context(tree, None, 1)
            self._converse(tree, root, turns, result)
            yield tree.planted(f"rollout {number}")

    def forks(self, turns: int, *, prompt: float, step: float) -> CallTree:
        """A harness that rewrites its last message: no call's history holds the reply before as it was drawn."""
        tree = _Planter()
        place = self._context(tree, None, prompt)
        for _ in range(turns):
            place = self._context(tree, place, step)
            tree.add(place, self._tokens(REPLY), True)
        return tree.planted("forks")

    def subagents(self) -> CallTree:
        """Main loop of 16 k and 20 turns; five subagents with a common head of 8 k, and 5 turns each."""
        tree = _Planter()
        self._converse(tree, self._context(tree, None, 16_000), 20)
        head = self._context(tree, None, 8_000)
        for _ in range(5):
            self._converse(tree, head, 5)
        return tree.planted("subagents")

    def _converse(self, tree: _Planter, place: int, turns: int, result: float = RESULT) -> None:
        for _ in range(turns):
            place = tree.add(self._context(tree, place, result), self._tokens(REPLY), True)

    def _context(self, tree: _Planter, parent: int | None, length: float) -> int:
        return tree.add(parent, self._tokens(length), False)

    def _tokens(self, length: float) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (max(1, round(length * self._scale)),), generator=self._rng).tolist())


class _Planter:
    def __init__(self) -> None:
        self._nodes: list[Node] = []

    def add(self, parent_id: int | None, token_ids: tuple[int, ...], sampled: bool) -> int:
        node_id, length = len(self._nodes), len(token_ids)
        self._nodes.append(
            Node(
                node_id=node_id,
                parent_id=parent_id,
                start=0 if parent_id is None else self._nodes[parent_id].end,
                token_ids=token_ids,
                sampled=sampled,
                sampling_logprobs=(-2.0,) * length if sampled else (),
                weight_versions=(VersionSpan(version=0, start=0, end=length),) if sampled else (),
                call_id=node_id if sampled else None,
            )
        )
        return node_id

    def planted(self, name: str) -> CallTree:
        return CallTree(rollout_id=name, nodes=tuple(self._nodes), leaf_of_call={})


@dataclass(frozen=True, kw_only=True)
class PlainRow:
    """A sequence as other trainers compute it."""

    token_ids: tuple[int, ...]
    trained: tuple[int, ...]
    """Places of the tokens that train here."""
    draws: tuple[int, ...]
    """Which of the step's draws these are."""


def path_rows(trees: Sequence[StepTree]) -> list[PlainRow]:
    """Every root-to-leaf path; a drawn token trains on the first one that holds it."""
    rows = []
    for tree in trees:
        done: set[int] = set()
        for leaf in tree.tree.leaves:
            nodes = [tree.tree.nodes[step] for step in tree.tree.path(leaf)]
            rows.append(_row(tree, nodes, [node for node in nodes if node.sampled and node.node_id not in done]))
            done |= {node.node_id for node in nodes}
    return rows


def call_rows(trees: Sequence[StepTree]) -> list[PlainRow]:
    """Every call: its prompt, and its reply, which trains."""
    rows = []
    for tree in trees:
        for call in (node for node in tree.tree.nodes if node.sampled):
            rows.append(_row(tree, [tree.tree.nodes[step] for step in tree.tree.path(call.node_id)], [call]))
    return rows


def _row(tree: StepTree, nodes: Sequence[Node], trained: Sequence[Node]) -> PlainRow:
    return PlainRow(
        token_ids=tuple(token for node in nodes for token in node.token_ids),
        trained=tuple(at for node in trained for at in range(node.start, node.end)),
        draws=tuple(
            tree.draw_of_call[node.call_id] + offset
            for node in trained
            if node.call_id is not None
            for offset in range(len(node.token_ids))
        ),
    )
