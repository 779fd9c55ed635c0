"""The tokens of a session's calls, each stored as a difference to its parent.

Storage grows with the new tokens of a call only, four bytes for each. `clawhpc.tree.build.whole_calls` is the inverse.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from clawhpc.engine.ids import INT32, PromptIds
from clawhpc.records import CallTokens, Generation, Graft, VersionSpan
from clawhpc.tree.prefix import shared_length


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredCall:
    """One call's own tokens."""

    parent_id: int | None
    prefix_length: int
    """Tokens that it shares with its parent, from the start."""
    tail: array[int]
    """The rest of its prompt, and its completion."""
    completion_ids: array[int]
    sampling_logprobs: array[float]
    weight_versions: tuple[VersionSpan, ...]
    repeats: tuple[Graft, ...]
    """All recorded replies that its prompt repeats."""
    new_repeats: tuple[Graft, ...]
    """Those that do not follow from its parent's."""
    reencoded_replies: int

    @property
    def length(self) -> int:
        """Of prompt and completion."""
        return self.prefix_length + len(self.tail)

    def written_out(self) -> CallTokens:
        """As it is recorded."""
        suffix = self.tail[: len(self.tail) - len(self.completion_ids)]
        return CallTokens(
            prefix_length=self.prefix_length,
            suffix_ids=tuple(suffix),
            completion_ids=tuple(self.completion_ids),
            sampling_logprobs=tuple(self.sampling_logprobs),
            weight_versions=self.weight_versions,
            grafts=self.new_repeats,
            reencoded_replies=self.reencoded_replies,
        )


class TokenStore:
    """Finds for each prompt the call whose tokens it extends the furthest, and keeps only what is new."""

    def __init__(self) -> None:
        self._calls: dict[int, StoredCall] = {}
        self._children: defaultdict[int | None, list[int]] = defaultdict(list)

    def get(self, call_id: int) -> StoredCall | None:
        """None for a call without tokens."""
        return self._calls.get(call_id)

    def add(
        self,
        call_id: int,
        prompt: PromptIds,
        generation: Generation,
        *,
        continues_id: int | None,
        grafts: tuple[Graft, ...] = (),
        reencoded_replies: int = 0,
    ) -> StoredCall:
        """Store a call that has drawn its reply."""
        ids = prompt.whole()
        parent_id, shared = self._find_parent(ids, call_id, continues_id)
        completion_ids = array(INT32, generation.completion_ids)
        stored = StoredCall(
            parent_id=parent_id,
            prefix_length=shared,
            tail=ids[shared:] + completion_ids,
            completion_ids=completion_ids,
            sampling_logprobs=array("d", generation.sampling_logprobs),
            weight_versions=generation.weight_versions,
            repeats=grafts,
            new_repeats=self._new_repeats(grafts, parent_id, shared, continues_id),
            reencoded_replies=reencoded_replies,
        )
        self._calls[call_id] = stored
        self._children[parent_id].append(call_id)
        return stored

    def _new_repeats(
        self, grafts: tuple[Graft, ...], parent_id: int | None, shared: int, continues_id: int | None
    ) -> tuple[Graft, ...]:
        """Without those that the shared prefix brings with it; see `tree.build`."""
        if parent_id is None:
            return grafts
        parent = self._calls[parent_id]
        inherited = {graft for graft in parent.repeats if graft.start + graft.length <= shared}
        if parent_id == continues_id and shared == parent.length:
            length = len(parent.completion_ids)
            inherited.add(Graft(call_id=parent_id, start=shared - length, length=length))
        return tuple(graft for graft in grafts if graft not in inherited)

    def _find_parent(self, prompt: array[int], call_id: int, continues_id: int | None) -> tuple[int | None, int]:
        """Of the earlier calls that share most with the prompt: the continued one, if it is among them."""
        found = self._shared_lengths(prompt, call_id)
        best = max(found, key=lambda call: (call[1], call[0] == continues_id), default=(None, 0))
        return best if best[1] else (None, 0)

    def _shared_lengths(self, prompt: array[int], before: int) -> Iterator[tuple[int, int]]:
        """(call, tokens that its prompt and completion share with `prompt` from the start), for calls before `before`.

        Walks down from the roots. A call that parts from its parent beyond what that shares with the prompt shares just
        as much; one whose prompt parts from it before shares less. Both are left out, with all below them.
        """
        waiting = [(child, 0) for child in self._children[None]]
        while waiting:
            call_id, reached = waiting.pop()
            stored = self._calls[call_id]
            parts = len(stored.tail) > len(stored.completion_ids)
            if call_id >= before or stored.prefix_length > reached or (parts and stored.prefix_length < reached):
                continue
            shared = stored.prefix_length + shared_length(stored.tail, prompt, stored.prefix_length)
            yield call_id, shared
            waiting.extend((child, shared) for child in self._children[call_id])
