"""Which recorded replies a new history repeats.

First by exact history: the same messages before it, then the same reply. Where what stands before has changed (a
harness that edits, drops or moves older messages), by the reply alone; where the reply has changed too (a harness that
renames a tool that there is not), by the id of its first tool call. Replies are assigned from the last message back:
the reply that a call continued is the likeliest one before that call's own.

A history that goes on where a recorded reply was drawn repeats what that call's own history does: only the messages
after it are looked at.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass

from clawhpc.engine.ids import INT32
from clawhpc.records import Message, Reply
from clawhpc.wire.canonical import History, digest_after, digest_message, digest_reply

Messages = tuple[Message, ...]
Found = dict[int, "HeardHistory"]
"""call_id of a recorded reply -> what it answered."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeardHistory:
    """The messages of one request, and what they repeat. Kept for every call: hence the arrays."""

    messages: Messages
    place: bytes
    """The chain digest of them all."""
    predecessor: bytes
    """The digest of the last of them, which is to be answered."""
    indices: array[int]
    """Of the messages that repeat a recorded reply, ascending."""
    call_ids: array[int]
    """Aligned with `indices`: the calls that drew them."""
    num_rewritten: int
    """Messages of the assistant that say what nobody drew there: behind a recorded reply, or where one was drawn."""

    @property
    def matched(self) -> dict[int, int]:
        """Index of each message that repeats a recorded reply -> the call that drew it, ascending."""
        return dict(zip(self.indices, self.call_ids, strict=True))

    @property
    def continues_id(self) -> int | None:
        """The call whose reply is the last recorded one."""
        return self.call_ids[-1] if self.call_ids else None

    @property
    def new_messages(self) -> Messages:
        """Those after the last recorded reply."""
        return self.messages[self.indices[-1] + 1 :] if self.indices else self.messages


class ReplyIndex:
    """The replies of one session, to be found again in later histories."""

    def __init__(self) -> None:
        self._by_history: defaultdict[tuple[bytes, bytes], Found] = defaultdict(dict)
        self._by_answer: defaultdict[tuple[bytes, bytes], Found] = defaultdict(dict)
        """By the message that it answered, and the reply."""
        self._by_reply: defaultdict[bytes, Found] = defaultdict(dict)
        self._by_tool_call: dict[str, Found] = {}
        self._places: set[bytes] = set()
        """The histories after which a reply was drawn."""
        self._answered: set[bytes] = set()
        """The messages after which one was drawn, whatever stood before."""
        self._digests: dict[Message, bytes] = {}

    def add(self, call_id: int, reply: Reply, heard: HeardHistory) -> None:
        """`call_id` answered what it heard with `reply`."""
        digest = digest_reply(reply)
        self._by_history[heard.place, digest][call_id] = heard
        self._by_answer[heard.predecessor, digest][call_id] = heard
        self._by_reply[digest][call_id] = heard
        self._by_tool_call.update((call.id, {call_id: heard}) for call in reply.tool_calls[:1])
        self._places.add(heard.place)
        self._answered.add(heard.predecessor)

    def match(self, messages: Messages) -> HeardHistory:
        """What a new history repeats."""
        start, call_id, known = self._continued(messages)
        identity = digest_after(known.place if known else b"", map(self._digest, messages[start:]))
        if known is None:
            matched, rewritten = self._match_all(messages, identity), 0
        else:
            matched, rewritten = {**known.matched, start: call_id}, known.num_rewritten
        rewritten += self._count_rewritten(messages[start:], identity, {index - start for index in matched})
        return HeardHistory(
            messages=messages,
            place=identity.chain[-1],
            predecessor=identity.messages[-1],
            indices=array(INT32, matched.keys()),
            call_ids=array(INT32, matched.values()),
            num_rewritten=rewritten,
        )

    def _count_rewritten(self, messages: Messages, identity: History, matched: set[int]) -> int:
        """Of `messages`, those of the assistant in whose place something was drawn, or before which something was."""
        behind, before = min(matched, default=len(messages)), (b"", *identity.messages)
        return sum(
            message.role == "assistant"
            and index not in matched
            and (index > behind or identity.chain[index] in self._places or before[index] in self._answered)
            for index, message in enumerate(messages)
        )

    def _continued(self, messages: Messages) -> tuple[int, int, HeardHistory | None]:
        """Where the last recorded reply stands, its call, and what that answered, if it is all that stands before."""
        for index in reversed(range(len(messages))):
            if messages[index].role == "assistant" and (found := self._like(messages[index])):
                same = [one for one, heard in found.items() if _is_beginning(heard.messages, messages, index)]
                return (index, max(same), found[max(same)]) if same else (0, 0, None)
        return 0, 0, None

    def _like(self, message: Message) -> Found:
        """The replies that a message of the assistant may repeat, wherever they were drawn."""
        called = message.tool_calls[0].id if message.tool_calls else ""
        return self._by_reply.get(self._digest(message)) or self._by_tool_call.get(called, {})

    def _digest(self, message: Message) -> bytes:
        """Each message of a session is hashed once."""
        digest = self._digests.get(message)
        if digest is None:
            digest = self._digests[message] = digest_message(message)
        return digest

    def _match_all(self, messages: Messages, identity: History) -> dict[int, int]:
        matched: dict[int, int] = {}
        continued: int | None = None
        for index in reversed(range(len(messages))):
            if messages[index].role == "assistant" and (found := self._likeliest(messages, identity, index, continued)):
                matched[index], continued = found
        return dict(sorted(matched.items()))

    def _likeliest(
        self, messages: Messages, identity: History, index: int, continued: int | None
    ) -> tuple[int, int | None] | None:
        """The origin of the reply at `index`, and the call that it continues; `continued` is that of the next reply."""
        reply, predecessor = identity.messages[index], identity.messages[index - 1] if index else b""
        here = self._by_history.get((identity.chain[index], reply))
        found = here or self._like(messages[index])
        if continued not in found:
            alike = found if _says_something(messages[index]) else {}  # blank replies are all alike
            found = here or self._by_answer.get((predecessor, reply)) or alike
        if not found:
            return None
        call_id = continued if continued is not None and continued in found else max(found)
        return call_id, found[call_id].continues_id


def _says_something(message: Message) -> bool:
    return bool(message.text.strip() or message.tool_calls)


def _is_beginning(messages: Messages, whole: Messages, length: int) -> bool:
    return len(messages) == length and messages == whole[:length]
