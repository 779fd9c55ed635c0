"""Which recorded replies a new history repeats.

First by exact history: the same messages before it, then the same reply. Where what stands before has changed (a
harness that edits, drops or moves older messages), by the reply alone. Replies are assigned from the last message back:
the reply that a call continued is the likeliest one before that call's own.

A history that goes on where a recorded reply was drawn repeats what that call's own history does: only the messages
after it are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from clawhpc.records import Message
from clawhpc.wire.canonical import EMPTY_HISTORY, History, digest_message, extend_history

Messages = tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedHistory:
    """A reply that was drawn, and where."""

    call_id: int
    messages: Messages
    """What it answered."""
    history: History
    """Their identity."""
    matched: dict[int, int]
    """Index of each of them that repeats a recorded reply -> the call that drew it, ascending."""

    @property
    def predecessor(self) -> bytes:
        """Digest of the message that it answered."""
        return self.history.messages[-1]

    @property
    def continues_id(self) -> int | None:
        """The call whose reply is the last recorded one before it."""
        return next(reversed(self.matched.values()), None)


class ReplyIndex:
    """The replies of one session, to be found again in later histories."""

    def __init__(self) -> None:
        self._by_history: defaultdict[tuple[bytes, bytes], list[RecordedHistory]] = defaultdict(list)
        self._by_reply: defaultdict[bytes, list[RecordedHistory]] = defaultdict(list)
        self._digests: dict[Message, bytes] = {}

    def add(self, reply: bytes, recorded: RecordedHistory) -> None:
        """`reply`, a message digest, was drawn there."""
        self._by_history[recorded.history.chain[-1], reply].append(recorded)
        self._by_reply[reply].append(recorded)

    def match(self, messages: Messages) -> tuple[History, dict[int, int]]:
        """The identity of `messages`, and `RecordedHistory.matched` of them."""
        start, known = self._continued(messages)
        if known is not None:
            after = (self._digest(message) for message in messages[start:])
            return extend_history(known.history, after), {**known.matched, start: known.call_id}
        history = extend_history(EMPTY_HISTORY, map(self._digest, messages))
        return history, self._match_all(messages, history)

    def _continued(self, messages: Messages) -> tuple[int, RecordedHistory | None]:
        """Where the last reply that may be recorded stands, and its origin if it was drawn at this very place."""
        for index in reversed(range(len(messages))):
            if messages[index].role == "assistant" and (found := self._by_reply.get(self._digest(messages[index]))):
                same = (one for one in found if len(one.messages) == index and one.messages == messages[:index])
                return index, max(same, key=lambda one: one.call_id, default=None)
        return 0, None

    def _digest(self, message: Message) -> bytes:
        """Each message of a session is hashed once."""
        digest = self._digests.get(message)
        if digest is None:
            digest = self._digests[message] = digest_message(message)
        return digest

    def _match_all(self, messages: Sequence[Message], history: History) -> dict[int, int]:
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
        found = self._by_history.get((history.chain[index], reply)) or self._by_reply.get(reply)
        if found is None:
            return None
        predecessor = history.messages[index - 1] if index else b""
        continued = None if after is None else after.continues_id
        return max(
            found, key=lambda one: (one.call_id == continued, one.predecessor == predecessor, one.call_id), default=None
        )
