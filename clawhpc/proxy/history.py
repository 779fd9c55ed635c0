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
Found = dict[int, "HeardHistory"]
"""call_id of a recorded reply -> what it answered."""


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
        self._digests: dict[Message, bytes] = {}

    def add(self, call_id: int, reply: Reply, heard: HeardHistory) -> None:
        """`call_id` answered what it heard with `reply`."""
        identity, digest = heard.identity, digest_reply(reply)
        self._by_history[identity.chain[-1], digest][call_id] = heard
        self._by_answer[identity.messages[-1], digest][call_id] = heard
        self._by_reply[digest][call_id] = heard
        self._by_tool_call.update((call.id, {call_id: heard}) for call in reply.tool_calls[:1])
        self._places.add(identity.chain[-1])

    def match(self, messages: Messages) -> HeardHistory:
        """What a new history repeats."""
        start, call_id, known = self._continued(messages)
        if known is None:
            identity = extend_history(EMPTY_HISTORY, map(self._digest, messages))
            matched, rewritten = self._match_all(messages, identity), 0
        else:
            identity = extend_history(known.identity, map(self._digest, messages[start:]))
            matched, rewritten = {**known.matched, start: call_id}, known.num_rewritten
        rewritten += sum(
            messages[index].role == "assistant" and index not in matched and identity.chain[index] in self._places
            for index in range(start, len(messages))
        )
        return HeardHistory(messages=messages, identity=identity, matched=matched, num_rewritten=rewritten)

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
            found = here or self._by_answer.get((predecessor, reply)) or found
        if not found:
            return None
        call_id = continued if continued is not None and continued in found else max(found)
        return call_id, found[call_id].continues_id


def _is_beginning(messages: Messages, whole: Messages, length: int) -> bool:
    return len(messages) == length and messages == whole[:length]
