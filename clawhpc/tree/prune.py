"""Decide which calls train, by named rules (law 4), and count what each rule drops.

`dead`   no later call's history contains the reply, and the conversation went on without it: a retry, a regeneration
`role`   a subagent, a compaction or a side call, unless its role is trained on purpose

A call whose reply a later history contains was heard, so it stays even where that later call is dropped: the
conversation before a compaction trains although the compaction does not. Over-branching is counted last: a rollout with
more than `max_live_leaves` live leaves in one conversation is discarded. A grafted copy continues its draw, so the draw
is no leaf; a reply that had to be encoded again is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from clawhpc.records import CallRecord, CallRole, Message
from clawhpc.tree.build import WholeCall, plant, whole_calls
from clawhpc.tree.nodes import CallTree

MAIN_ONLY = frozenset({CallRole.MAIN})


class DropRule(StrEnum):
    """Why a call does not train."""

    DEAD = "dead"
    ROLE = "role"


@dataclass(frozen=True, kw_only=True)
class PrunedTree:
    """What trains of one rollout: exactly the sampled nodes of `tree`, unless `over_branched`."""

    tree: CallTree
    """The tree of the live calls alone; a dropped call's reply, where a live prompt repeats it, is context."""
    dropped: dict[int, DropRule]
    """call_id -> the rule that dropped it; every call with tokens is here or in `tree.leaf_of_call`."""
    dropped_leaves: dict[str, int]
    """Rule -> how many leaves it dropped: calls whose reply no prompt repeats."""
    live_leaves: dict[int, tuple[int, ...]]
    """conversation_id -> its live calls whose reply no live prompt repeats, in order."""
    over_branched: bool
    """Some conversation has more live leaves than the limit: the rollout is discarded."""


def prune_tree(
    rollout_id: str,
    calls: Sequence[CallRecord],
    *,
    max_live_leaves: int,
    trained_roles: Container[CallRole] = MAIN_ONLY,
) -> PrunedTree:
    """Apply the rules to the calls and rebuild the tree from those that are left. Errors as in `build_tree`."""
    whole = whole_calls(calls)
    dead = find_dead_calls(calls, whole)
    off_role = {call.call_id for call in calls if call.role not in trained_roles}
    dropped = {
        call_id: DropRule.DEAD if call_id in dead else DropRule.ROLE
        for call_id in whole
        if call_id in dead or call_id in off_role
    }
    live = {call_id: call for call_id, call in whole.items() if call_id not in dropped}
    all_leaves = _leaves(whole)
    live_leaves = _by_conversation(calls, _leaves(live))
    return PrunedTree(
        tree=plant(rollout_id, live.values()),
        dropped=dropped,
        dropped_leaves=dict(Counter(str(rule) for call_id, rule in dropped.items() if call_id in all_leaves)),
        live_leaves=live_leaves,
        over_branched=any(len(leaves) > max_live_leaves for leaves in live_leaves.values()),
    )


def find_dead_calls(calls: Sequence[CallRecord], whole: Mapping[int, WholeCall]) -> set[int]:
    """The calls with tokens whose reply went nowhere while their conversation went on.

    A failed call that draws nothing still hears the replies in its history. Roles are kept apart, so that a late side
    call does not make the main loop's last word look like a retry.
    """
    heard = {call.continues_id for call in calls}
    heard.update(graft.call_id for call in whole.values() for graft in call.repeats)
    last: dict[tuple[int, CallRole], int] = {}
    resent: dict[tuple[object, ...], int] = {}
    drawn = sorted((call for call in calls if call.call_id in whole), key=lambda call: call.call_id)
    for call in drawn:
        last[call.conversation_id, call.role] = call.call_id
        resent[_identity(call, whole)] = call.call_id
    first = [call for call in drawn if call.continues_id is None]
    return {
        call.call_id
        for call in drawn
        if call.call_id not in heard
        and (
            last[call.conversation_id, call.role] != call.call_id
            or resent[_identity(call, whole)] != call.call_id
            or (call.continues_id is None and any(_asks_again(later, call) for later in first))
        )
    }


def _identity(call: CallRecord, whole: Mapping[int, WholeCall]) -> tuple[object, ...]:
    """Equal for a first request and its retry, which opens a conversation of its own; not for twin subagents."""
    return call.role, tuple(sorted(call.headers.items())), whole[call.call_id].prompt_ids


def _asks_again(later: CallRecord, earlier: CallRecord) -> bool:
    """Both open a conversation of the main loop, of which there is one at a time, and `later` repeats all of the
    request of `earlier`, with words added here and there: so do harnesses that leave an empty reply out.
    """
    if later.call_id <= earlier.call_id or not later.role == earlier.role == CallRole.MAIN:
        return False
    asked, again = earlier.new_messages, iter(later.new_messages)
    return bool(asked) and all(any(_repeats(message, told) for message in again) for told in asked)


def _repeats(message: Message, told: Message) -> bool:
    """The same text, or with lines of the harness's own after it."""
    more = message.text.startswith(f"{told.text}\n") and told.text != ""
    return message.role == told.role and (more or message.text == told.text)


def _leaves(calls: Mapping[int, WholeCall]) -> set[int]:
    """Those calls whose reply no prompt among `calls` repeats, neither where it was drawn nor as a grafted copy."""
    return calls.keys() - {graft.call_id for call in calls.values() for graft in call.repeats}


def _by_conversation(calls: Sequence[CallRecord], leaves: set[int]) -> dict[int, tuple[int, ...]]:
    grouped: dict[int, tuple[int, ...]] = {}
    for call in sorted(calls, key=lambda call: call.call_id):
        if call.call_id in leaves:
            grouped[call.conversation_id] = (*grouped.get(call.conversation_id, ()), call.call_id)
    return grouped
