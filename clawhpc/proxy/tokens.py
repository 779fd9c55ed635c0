"""The tokens of a session's calls, each stored as a difference to its parent.

Storage grows with the new tokens of a call only. `clawhpc.tree.build.whole_calls` is the inverse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from clawhpc.records import CallTokens, Generation, Graft
from clawhpc.tree.prefix import Ids, shared_length


@dataclass(frozen=True, kw_only=True)
class StoredCall:
    """One call's own tokens."""

    prefix_length: int
    """Tokens that it shares with its parent, from the start."""
    tail: Ids
    """The rest of its prompt, and its completion."""


class TokenStore:
    """Finds for each prompt the call whose tokens it extends the furthest, and keeps only what is new."""

    def __init__(self) -> None:
        self._calls: dict[int, StoredCall] = {}
        self._completions: dict[int, Ids] = {}
        self._children: defaultdict[int | None, list[int]] = defaultdict(list)

    def completion_ids(self, call_id: int) -> Ids | None:
        """What `call_id` drew; None for a call without tokens."""
        return self._completions.get(call_id)

    def add(
        self,
        call_id: int,
        generation: Generation,
        *,
        continues_id: int | None,
        grafts: tuple[Graft, ...] = (),
        reencoded_replies: int = 0,
    ) -> tuple[int | None, CallTokens]:
        """Store a call that has drawn its reply; returns its parent and the tokens to record."""
        parent_id, shared = self._find_parent(generation.prompt_ids, call_id, continues_id)
        suffix = generation.prompt_ids[shared:]
        self._calls[call_id] = StoredCall(prefix_length=shared, tail=suffix + generation.completion_ids)
        self._completions[call_id] = generation.completion_ids
        self._children[parent_id].append(call_id)
        return parent_id, CallTokens(
            prefix_length=shared,
            suffix_ids=suffix,
            completion_ids=generation.completion_ids,
            sampling_logprobs=generation.sampling_logprobs,
            weight_versions=generation.weight_versions,
            grafts=grafts,
            reencoded_replies=reencoded_replies,
        )

    def _find_parent(self, prompt: Ids, call_id: int, continues_id: int | None) -> tuple[int | None, int]:
        """Of the earlier calls that share most with the prompt: the continued one, if it is among them."""
        found = self._shared_lengths(prompt, call_id)
        best = max(found, key=lambda call: (call[1], call[0] == continues_id), default=(None, 0))
        return best if best[1] else (None, 0)

    def _shared_lengths(self, prompt: Ids, before: int) -> Iterator[tuple[int, int]]:
        """(call, tokens that its prompt and completion share with `prompt` from the start), for calls before `before`.

        Walks down from the roots. A call whose branching point lies beyond what its parent shares is left out, with
        all below it: it shares exactly what its parent does.
        """
        waiting = [(child, 0) for child in self._children[None]]
        while waiting:
            call_id, reached = waiting.pop()
            stored = self._calls[call_id]
            if call_id >= before or stored.prefix_length > reached:
                continue
            shared = stored.prefix_length + shared_length(stored.tail, prompt, stored.prefix_length)
            yield call_id, shared
            waiting.extend((child, shared) for child in self._children[call_id])
