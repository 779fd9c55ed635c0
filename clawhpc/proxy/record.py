"""A call while it is answered, and what a session remembers of those that have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio

from clawhpc.engine.render import RecordedReply
from clawhpc.proxy.history import HeardHistory, ReplyIndex
from clawhpc.proxy.respond import NO_USAGE, Prompt, Response
from clawhpc.proxy.tokens import TokenStore
from clawhpc.records import CallRecord, CallRole, Conversation, Tool
from clawhpc.wire.base import WireError, WireRequest


@dataclass(kw_only=True, eq=False)
class OpenCall:
    """A call that is being answered, or whose answer has not been delivered yet."""

    call_id: int
    key: tuple[object, ...]
    """Equal for requests that are the same: they share one call until its answer is delivered."""
    protocol: str
    request: WireRequest
    role: CallRole
    headers: dict[str, str]
    """Those from which the role was read."""
    heard: HeardHistory
    """What its messages repeat."""
    received_at: float
    """Seconds since the epoch."""
    started: float
    """By the event loop's clock, like `ended` below."""
    prompt: Prompt | None = None
    """None until it is `prepared`, and when it does not fit the window."""
    response: Response | None = None
    error: WireError | None = None
    """What the harness hears when there is no response."""
    incidents: list[str] = field(default_factory=list)
    """See `CallRecord`."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Around rendering and draw."""
    prepared: anyio.Event = field(default_factory=anyio.Event)
    """Set when there is a prompt or an error."""
    done: anyio.Event = field(default_factory=anyio.Event)
    """Set when there is a response or an error."""

    @property
    def continues_id(self) -> int | None:
        """The call whose reply is the last recorded one in the history."""
        return self.heard.continues_id


class CallMemory:
    """The ended calls of one session: their records, and what is needed to recognise them in later histories."""

    def __init__(self) -> None:
        self._records: dict[int, CallRecord] = {}
        self._tools: dict[int, tuple[Tool, ...]] = {}
        self._replies = ReplyIndex()
        self._tokens = TokenStore()
        self._drawn: dict[int, RecordedReply] = {}

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """In order of arrival. Tokens are written out here, from a fraction of the memory."""
        return tuple(self._whole_record(call_id) for call_id in sorted(self._records))

    def _whole_record(self, call_id: int) -> CallRecord:
        record, stored = self._records[call_id], self._tokens.get(call_id)
        return record if stored is None else dataclasses.replace(record, tokens=stored.written_out())

    def match(self, conversation: Conversation) -> HeardHistory:
        """What the messages of a conversation repeat."""
        return self._replies.match(conversation.messages)

    def recorded_replies(self, matched: Mapping[int, int]) -> dict[int, RecordedReply]:
        """The ids of matched replies by message index; those of text-only calls have none."""
        return {index: self._drawn[call_id] for index, call_id in matched.items() if call_id in self._drawn}

    def keep(self, call: OpenCall, response: Response, ended: float) -> None:
        """Record a call that was answered."""
        parent_id = None
        if response.generation is not None:
            rendered = call.prompt.rendered if call.prompt else None
            assert rendered is not None, "what was drawn had a prompt"
            stored = self._tokens.add(
                call.call_id,
                rendered.ids,
                response.generation,
                continues_id=call.continues_id,
                grafts=rendered.grafts,
                reencoded_replies=rendered.reencoded_replies + call.heard.num_rewritten,
            )
            parent_id = stored.parent_id
            self._drawn[call.call_id] = RecordedReply(
                call_id=call.call_id, completion_ids=stored.completion_ids, prompt=rendered
            )
        self._replies.add(call.call_id, response.reply, call.heard)
        self._record(call, response, parent_id=parent_id, failure="", ended=ended)

    def give_up(self, call: OpenCall, failure: str, ended: float) -> None:
        """Record a call that has no answer. It can be nobody's parent and is in no history."""
        self._record(call, None, parent_id=None, failure=failure, ended=ended)

    def mark_delivered(self, call_id: int) -> None:
        """The harness has the whole answer."""
        self._records[call_id] = dataclasses.replace(self._records[call_id], delivered=True)

    def _record(
        self,
        call: OpenCall,
        response: Response | None,
        *,
        parent_id: int | None,
        failure: str,
        ended: float,
    ) -> None:
        conversation, continues_id = call.request.conversation, call.continues_id
        known_tools = None if continues_id is None else self._tools[continues_id]
        tools_same = known_tools == conversation.tools
        # Equal tools are kept once: a harness sends its tens of kilobytes of schemas with every request.
        self._tools[call.call_id] = known_tools if known_tools is not None and tools_same else conversation.tools
        self._records[call.call_id] = CallRecord(
            call_id=call.call_id,
            parent_id=parent_id,
            conversation_id=call.call_id if continues_id is None else self._records[continues_id].conversation_id,
            continues_id=continues_id,
            role=call.role,
            protocol=call.protocol,
            headers=call.headers,
            new_messages=call.heard.new_messages,
            tools=() if tools_same else conversation.tools,
            tools_same=tools_same,
            requested=conversation.sampling,
            overridden=_overridden(call),
            unlisted=call.request.unlisted,
            reply=response.reply if response else None,
            tokens=None,
            usage=response.usage if response else NO_USAGE,
            model=response.model if response else "",
            received_at=call.received_at,
            duration_s=ended - call.started,
            engine_s=response.engine_s if response else 0.0,
            delivered=False,
            failure=failure,
            incidents=tuple(call.incidents),
        )


def _overridden(call: OpenCall) -> tuple[str, ...]:
    """A harness that asks for the campaign's own temperature gets what it asks for."""
    asked, given = call.request.conversation.sampling.temperature, call.prompt.temperature if call.prompt else None
    paths = call.request.overridden
    return paths if asked != given else tuple(path for path in paths if path.rpartition(".")[2] != "temperature")
