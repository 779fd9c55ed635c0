"""How faithfully a harness's histories repeated what was drawn: counted per rollout, with an alarm.

Each live call that continues another does so in one of three ways. It *extends* the draw: same place, same ids. It
*copies* it: the recorded ids stand behind another prompt, as when a harness moves its last message. Or the reply was
*encoded again*: the recorded ids were lost, and with them the claim that what trains is what was drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from clawhpc.records import CallRecord
from clawhpc.tree.nodes import CallTree
from clawhpc.tree.prune import PrunedTree


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Counts over the live calls of one rollout."""

    extended: int
    """Calls that run through the draw that they continue."""
    copied: int
    """Calls that repeat it as a grafted copy: a fork where a continuation was expected, with exact ids."""
    reencoded: int
    """Calls that repeat it in other ids: a defect of the proxy, or a harness that rewrites replies."""
    reencoded_replies: int
    """Replies that stand in a history as text, those of dropped calls included; see `count_reencoded`."""
    unexplained_leaves: int
    """Live leaves whose reply a live history contains all the same."""

    @property
    def alarm(self) -> bool:
        """The tree has more live leaves than its calls explain."""
        return self.unexplained_leaves > 0


def measure_drift(calls: Sequence[CallRecord], pruned: PrunedTree) -> Drift:
    """Classify every continuation among the live calls of a pruned rollout."""
    live = pruned.tree.leaf_of_call
    both_live = (call for call in calls if call.call_id in live and call.continues_id in live)
    continued = {call.call_id: call.continues_id for call in both_live}
    kinds = Counter(_kind(pruned.tree, call_id, heard) for call_id, heard in continued.items())
    leaves = {call_id for ids in pruned.live_leaves.values() for call_id in ids}
    return Drift(
        extended=kinds["extended"],
        copied=kinds["copied"],
        reencoded=kinds["reencoded"],
        reencoded_replies=count_reencoded(calls),
        unexplained_leaves=len(leaves & set(continued.values())),
    )


def count_reencoded(calls: Sequence[CallRecord]) -> int:
    """Replies of one rollout that were encoded again: 0, or a defect to look at. One counts where it appears, and not
    again in the calls that go on from there.
    """
    seen: dict[int | None, int] = {call.call_id: call.tokens.reencoded_replies for call in calls if call.tokens}
    return sum(max(0, seen[call.call_id] - seen.get(call.continues_id, 0)) for call in calls if call.call_id in seen)


def _kind(tree: CallTree, call_id: int, continues_id: int | None) -> str:
    """How the prompt of `call_id` repeats the reply of `continues_id`."""
    path = [tree.nodes[node_id] for node_id in tree.path(tree.leaf_of_call[call_id])]
    if any(node.call_id == continues_id for node in path):
        return "extended"
    return "copied" if any(node.continues_id == continues_id for node in path) else "reencoded"
