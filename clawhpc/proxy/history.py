"""Which recorded replies a new history repeats.

First by exact history: the same messages before it, then the same reply. Where what stands before has changed (a
harness that edits, drops or moves older messages), by the reply alone; where the reply has changed too (a harness that
renames a tool that there is not), by the id of its first tool call. Replies are assigned from the last message back:
the reply that a call continued is the likeliest one before that call's own.

A history that goes on where a recorded reply was drawn repeats what that call's own history does: only the messages
after it are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from clawhpc.records import Message, Reply
from clawhpc.wire.canonical import EMPTY_HISTORY, History, digest_message, digest_reply, extend_history

Messages = tuple[Message, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeardHistory:
    """The messages of one request, and what they repeat."""

    messages: Messages
    identity: History
    matched: dict[int, int]
    """Index of each message that repeats a recorded reply -> the call that drew it, ascending."""
    num_rewritten: int
    """Messages of the assistant that stand where a reply was drawn, and say what nobody drew there."""

    @property
    def continues_id(self) -> int | None:
        """The call whose reply is the last recorded one."""
        return next(reversed(self.matched.values()), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedHistory:
    """A reply that was drawn, and what it answered."""

    call_id: int
    heard: HeardHistory

    @property
    def predecessor(self) -> bytes:
        """Digest of the message that it answered."""
        return self.heard.identity.messages[-1]


class ReplyIndex:
    """The replies of one session, to be found again in later histories."""

    def __init__(self) -> None:
        self._by_history: defaultdict[tuple[bytes, bytes], list[RecordedHistory]] = defaultdict(list)
        self._by_reply: defaultdict[bytes, list[RecordedHistory]] = defaultdict(list)
        self._by_tool_call: dict[str, list[RecordedHistory]] = {}
        self._places: set[bytes] = set()
        """The histories after which a reply was drawn."""
        self._digests: dict[Message, bytes] = {}

    def add(self, call_id: int, reply: Reply, heard: HeardHistory) -> None:
        """`call_id` answered what it heard with `reply`."""
        recorded, place, digest = (
            RecordedHistory(call_id=call_id, heard=heard),
            heard.identity.chain[-1],
            digest_reply(reply),
        )
        self._by_history[place, digest].append(recorded)
        self._by_reply[digest].append(recorded)
        self._by_tool_call.update((call.id, [recorded]) for call in reply.tool_calls[:1])
        self._places.add(place)

    def match(self, messages: Messages) -> HeardHistory:
        """What a new history repeats."""
        start, known = self._continued(messages)
        if known is None:
            identity = extend_history(EMPTY_HISTORY, map(self._digest, messages))
            matched, rewritten = self._match_all(messages, identity), 0
        else:
            identity = extend_history(known.heard.identity, map(self._digest, messages[start:]))
            matched, rewritten = {**known.heard.matched, start: known.call_id}, known.heard.num_rewritten
        rewritten += sum(
            messages[index].role == "assistant" and index not in matched and identity.chain[index] in self._places
            for index in range(start, len(messages))
        )
        return HeardHistory(messages=messages, identity=identity, matched=matched, num_rewritten=rewritten)

    def _continued(self, messages: Messages) -> tuple[int, RecordedHistory | None]:
        """Where the last recorded reply stands, and its origin, if it was drawn at this very place; 0 and None else."""
        for index in reversed(range(len(messages))):
            if messages[index].role == "assistant" and (found := self._like(messages[index])):
                same = [one for one in found if _is_beginning(one.heard.messages, messages, index)]
                return (index, max(same, key=lambda one: one.call_id)) if same else (0, None)
        return 0, None

    def _like(self, message: Message) -> list[RecordedHistory]:
        """The replies that a message of the assistant may repeat, wherever they were drawn."""
        called = message.tool_calls[0].id if message.tool_calls else ""
        return self._by_reply.get(self._digest(message)) or self._by_tool_call.get(called, [])

    def _digest(self, message: Message) -> bytes:
        """Each message of a session is hashed once."""
        digest = self._digests.get(message)
        if digest is None:
            digest = self._digests[message] = digest_message(message)
        return digest

    def _match_all(self, messages: Messages, identity: History) -> dict[int, int]:
        matched: dict[int, int] = {}
        after: RecordedHistory | None = None
        for index in reversed(range(len(messages))):
            if messages[index].role == "assistant":
                found = self._find(messages, identity, index, after)
                if found is not None:
                    matched[index], after = found.call_id, found
        return dict(sorted(matched.items()))

    def _find(
        self, messages: Messages, identity: History, index: int, after: RecordedHistory | None
    ) -> RecordedHistory | None:
        """The likeliest origin of the reply at `index`; `after` is that of the next reply, if it has one."""
        here = self._by_history.get((identity.chain[index], identity.messages[index]))
        predecessor = identity.messages[index - 1] if index else b""
        continued = None if after is None else after.heard.continues_id
        return max(
            here or self._like(messages[index]),
            key=lambda one: (one.call_id == continued, one.predecessor == predecessor, one.call_id),
            default=None,
        )


def _is_beginning(messages: Messages, whole: Messages, length: int) -> bool:
    return len(messages) == length and messages == whole[:length]
