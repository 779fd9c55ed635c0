"""Several trees as one forest: what they share before any draw stands once, every draw by itself (law 2). Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from clawhpc.tree.nodes import CallTree, Node
from clawhpc.tree.prefix import shared_length


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
    call_id: int | None
    """Of a draw, its call."""


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
    return _largest_first(runs)


def _largest_first(runs: Sequence[Run]) -> list[Run]:
    """The same forest, in preorder that goes where most tokens are first: so the trunk of a tree stands in one piece.

    Attention on CPU takes fewer and larger parts then, whatever forks from the trunk.
    """
    sizes = [len(run.token_ids) for run in runs]
    children: list[list[int]] = [[] for _ in runs]
    for index in reversed(range(len(runs))):
        if (parent := runs[index].parent) is not None:
            sizes[parent] += sizes[index]
            children[parent].append(index)
    ordered: list[Run] = []
    stack: list[tuple[int | None, int]] = [
        (None, index) for index in reversed(range(len(runs))) if runs[index].parent is None
    ]
    while stack:
        parent, index = stack.pop()
        ordered.append(dataclasses.replace(runs[index], parent=parent))
        stack.extend((len(ordered) - 1, child) for child in sorted(children[index], key=sizes.__getitem__))
    return ordered


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
        return Run(
            parent=parent,
            start=node.start + self.offset,
            token_ids=self.rest[:length],
            tree=self.tree if node.sampled else None,
            call_id=node.call_id if node.sampled else None,
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
