"""Which recorded replies a new history repeats.

First by exact history: the same messages before it, then the same reply. Where what stands before has changed (a
harness that edits, drops or moves older messages), by the reply alone. Replies are assigned from the last message back:
the reply that a call continued is the likeliest one before that call's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from clawhpc.records import Message
from clawhpc.wire.canonical import History


@dataclass(frozen=True, kw_only=True)
class RecordedHistory:
    """A reply that was drawn, and where."""

    call_id: int
    predecessor: bytes
    """Digest of the message that it answered."""
    continues_id: int | None
    """The call whose reply is the last recorded one before it."""


class ReplyIndex:
    """The replies of one session, to be found again in later histories."""

    def __init__(self) -> None:
        self._by_history: defaultdict[tuple[bytes, bytes], list[RecordedHistory]] = defaultdict(list)
        self._by_reply: defaultdict[bytes, list[RecordedHistory]] = defaultdict(list)

    def add(self, call_id: int, history: History, reply: bytes, continues_id: int | None) -> None:
        """`reply`, a message digest, was drawn by `call_id` as the answer to `history`."""
        recorded = RecordedHistory(call_id=call_id, predecessor=history.messages[-1], continues_id=continues_id)
        self._by_history[history.chain[-1], reply].append(recorded)
        self._by_reply[reply].append(recorded)

    def match(self, messages: Sequence[Message], history: History) -> dict[int, int]:
        """Index of each assistant message that repeats a recorded reply -> the call that drew it, ascending."""
        matched: dict[int, int] = {}
        after: RecordedHistory | None = None
        for index in reversed(range(len(messages))):
            if messages[index].role == "assistant":
                found = self._find(history, index, after)
                if found is not None:
                    matched[index], after = found.call_id, found
        return dict(sorted(matched.items()))

    def _find(self, history: History, index: int, after: RecordedHistory | None) -> RecordedHistory | None:
        """The likeliest origin of the reply at `index`; `after` is that of the next reply, if it has one."""
        reply = history.messages[index]
        predecessor = history.messages[index - 1] if index else b""
        return max(
            self._by_history.get((history.chain[index], reply)) or self._by_reply.get(reply) or (),
            key=lambda found: (
                after is not None and found.call_id == after.continues_id,
                found.predecessor == predecessor,
                found.call_id,
            ),
            default=None,
        )
