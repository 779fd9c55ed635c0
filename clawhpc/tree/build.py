"""Rebuild the calls of a rollout into one prefix tree.

Each call's completion becomes a node of its own. A later prompt runs through that node only where it repeats the draw
at the place where it was drawn; anywhere else the recorded ids stand as a *grafted copy*: context, labelled with the
call that it repeats. So every draw is sampled exactly once, and two draws of equal ids stay two (law 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from clawhpc.records import CallRecord, CallRole, CallTokens, Graft
from clawhpc.tree.nodes import CallTree, Node
from clawhpc.tree.prefix import shared_length


def build_tree(rollout_id: str, calls: Sequence[CallRecord]) -> CallTree:
    """The prefix tree of `prompt_ids + completion_ids` of every call that has tokens.

    Calls that failed or were cancelled before they drew anything are left out. Raises `ValueError`, naming the call,
    for a text-only record and for tokens that do not fit those of earlier calls.
    """
    return plant(rollout_id, whole_calls(calls).values())


@dataclass(frozen=True, kw_only=True)
class WholeCall:
    """A call with tokens, with its prompt written out."""

    call_id: int
    role: CallRole
    prompt_ids: tuple[int, ...]
    tokens: CallTokens
    repeats: tuple[Graft, ...]
    """The recorded replies that the prompt repeats, in order, without overlap; those in the shared prefix included."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and completion."""
        return self.prompt_ids + self.tokens.completion_ids


def whole_calls(calls: Sequence[CallRecord]) -> dict[int, WholeCall]:
    """The calls with tokens, by call_id, in order. Errors as in `build_tree`."""
    whole: dict[int, WholeCall] = {}
    for call in sorted(calls, key=lambda call: call.call_id):
        if call.tokens is not None:
            whole[call.call_id] = _written_out(call, call.tokens, whole)
        elif call.reply is not None:
            raise ValueError(f"call {call.call_id} is a text-only record: it has a reply but no tokens to train on")
    return whole


def _written_out(call: CallRecord, tokens: CallTokens, earlier: dict[int, WholeCall]) -> WholeCall:
    parent = None if call.parent_id is None else earlier.get(call.parent_id)
    if parent is None and call.parent_id is not None:
        raise ValueError(f"call {call.call_id}: its parent {call.parent_id} is not an earlier call with tokens")
    head = parent.token_ids[: tokens.prefix_length] if parent else ()
    if len(head) != tokens.prefix_length:
        raise ValueError(
            f"call {call.call_id}: prefix_length {tokens.prefix_length}, but its parent has {len(head)} tokens"
        )
    if later := next((graft for graft in tokens.grafts if graft.call_id >= call.call_id), None):
        raise ValueError(f"call {call.call_id}: its prompt repeats call {later.call_id}, which did not come before it")
    prompt_ids = head + tokens.suffix_ids
    repeats = _without_overlap([*tokens.grafts, *_inherited_repeats(call, tokens, parent)], len(prompt_ids))
    return WholeCall(call_id=call.call_id, role=call.role, prompt_ids=prompt_ids, tokens=tokens, repeats=repeats)


def _inherited_repeats(call: CallRecord, tokens: CallTokens, parent: WholeCall | None) -> Iterator[Graft]:
    """What the prefix that a call shares with its parent repeats: the parent's repeats, and the parent's own reply."""
    if parent is None:
        return
    yield from (graft for graft in parent.repeats if graft.start + graft.length <= tokens.prefix_length)
    if call.continues_id == parent.call_id and tokens.prefix_length == len(parent.token_ids):
        length = len(parent.tokens.completion_ids)
        yield Graft(call_id=parent.call_id, start=len(parent.prompt_ids), length=length)


def _without_overlap(grafts: list[Graft], end: int) -> tuple[Graft, ...]:
    """The grafts inside a prompt of `end` tokens, by position; where two overlap, the one that starts first stays."""
    kept: list[Graft] = []
    position = 0
    for graft in sorted(grafts, key=lambda graft: (graft.start, graft.length)):
        if position <= graft.start <= graft.start + graft.length <= end:
            kept.append(graft)
            position = graft.start + graft.length
    return tuple(kept)


@dataclass
class _Branch:
    """A node while the tree grows; `source` is None for the virtual root."""

    token_ids: tuple[int, ...] = ()
    continues_id: int | None = None
    draw: WholeCall | None = None
    children: list[_Branch] = field(default_factory=list)

    def split(self, at: int) -> None:
        """Keep the first `at` tokens; the rest becomes the only child and takes the children."""
        rest = _Branch(token_ids=self.token_ids[at:], continues_id=self.continues_id, children=self.children)
        self.token_ids, self.children = self.token_ids[:at], [rest]


def plant(rollout_id: str, calls: Iterable[WholeCall]) -> CallTree:
    """The tree of the given calls alone; what they repeat of other calls stands as grafted copies."""
    root = _Branch()
    for call in calls:
        place = root
        for continues_id, start, end in _segments(call):
            token_ids = call.prompt_ids[start:end]
            place = _drawn_here(place, continues_id, token_ids) or _grow_context(place, continues_id, token_ids)
        place.children.append(_Branch(token_ids=call.tokens.completion_ids, draw=call))
    nodes = tuple(_preorder(root))
    return CallTree(
        rollout_id=rollout_id,
        nodes=nodes,
        leaf_of_call={node.call_id: node.node_id for node in nodes if node.call_id is not None},
    )


def _segments(call: WholeCall) -> Iterator[tuple[int | None, int, int]]:
    """Cut a prompt into (repeated call or None, start, end), in order."""
    position = 0
    for graft in call.repeats:
        if graft.start > position:
            yield None, position, graft.start
        position = graft.start + graft.length
        yield graft.call_id, graft.start, position
    if position < len(call.prompt_ids):
        yield None, position, len(call.prompt_ids)


def _drawn_here(place: _Branch, call_id: int | None, token_ids: tuple[int, ...]) -> _Branch | None:
    """The draw of `call_id`, if it was drawn at this very place and these are its tokens."""
    for child in place.children:
        if child.draw is not None and child.draw.call_id == call_id and child.token_ids == token_ids:
            return child
    return None


def _grow_context(place: _Branch, continues_id: int | None, token_ids: tuple[int, ...]) -> _Branch:
    """Walk down as far as context with this label is shared, fork there, and return where the tokens end."""
    position = 0
    while position < len(token_ids):
        child = _context_child(place, continues_id, token_ids[position])
        if child is None:
            place.children.append(_Branch(token_ids=token_ids[position:], continues_id=continues_id))
            return place.children[-1]
        shared = shared_length(child.token_ids, token_ids, position)
        if shared < len(child.token_ids):
            child.split(shared)
        place, position = child, position + shared
    return place


def _context_child(place: _Branch, continues_id: int | None, first: int) -> _Branch | None:
    for child in place.children:
        if child.draw is None and child.continues_id == continues_id and child.token_ids[0] == first:
            return child
    return None


def _preorder(root: _Branch) -> Iterator[Node]:
    node_id = 0
    stack: list[tuple[_Branch, int | None, int]] = [(child, None, 0) for child in reversed(root.children)]
    while stack:
        branch, parent_id, start = stack.pop()
        yield _frozen(branch, node_id, parent_id, start)
        end = start + len(branch.token_ids)
        stack.extend((child, node_id, end) for child in reversed(branch.children))
        node_id += 1


def _frozen(branch: _Branch, node_id: int, parent_id: int | None, start: int) -> Node:
    call, tokens = branch.draw, branch.draw.tokens if branch.draw else None
    return Node(
        node_id=node_id,
        parent_id=parent_id,
        start=start,
        token_ids=branch.token_ids,
        sampled=call is not None,
        sampling_logprobs=tokens.sampling_logprobs if tokens else (),
        weight_versions=tokens.weight_versions if tokens else (),
        call_id=call.call_id if call else None,
        role=call.role if call else CallRole.MAIN,
        continues_id=branch.continues_id,
    )
