"""An engine and a chat format that are token-exact, deterministic, and small enough to read.

One token per byte, and a second token for each byte, which decodes to the same: what the engine draws is never what an
encoder would make of its text, so a reply that is encoded again shows in the ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
from renderers.base import ParsedResponse, ParsedToolCall

from clawhpc.engine.client import SamplingParams
from clawhpc.engine.ids import PromptIds
from clawhpc.engine.render import RecordedReply, RenderedPrompt
from clawhpc.errors import EngineError
from clawhpc.records import Conversation, Generation, Graft, Message, VersionSpan

START, END = 256, 257
"""Special tokens around each message."""
DRAWN = 1000
"""`DRAWN + byte` is the second token of a byte: only the engine draws it."""

Ids = tuple[int, ...]


def encode(text: str) -> Ids:
    return tuple(text.encode())


def encode_drawn(text: str) -> Ids:
    return tuple(DRAWN + byte for byte in text.encode())


def encode_reply(text: str) -> Ids:
    return (*encode_drawn(text), END)


def decode(ids: Sequence[int]) -> str:
    return bytes(token % DRAWN for token in ids if token % DRAWN < START).decode(errors="replace")


@dataclass(frozen=True)
class FakeRequest:
    """What the engine was asked."""

    request_id: str
    prompt_ids: Ids
    params: SamplingParams


@dataclass
class FakeEngine:
    """Draws what `script` says to a prompt's text, gives the generation that it gives, or raises the error."""

    script: Callable[[str], str | Generation | Exception]
    gate: anyio.Event | None = None
    """Draws wait for it."""
    hangs: bool = False
    """It answers nobody; else what waits is a long completion."""
    back: anyio.Event | None = None
    """One that was lost is back when it is set; None: at once."""
    delay_s: float = 0.0
    draw_ids: Callable[[str], Ids] = encode_reply
    """What is drawn to say a text, its stop token included."""
    asked: anyio.Event = field(default_factory=anyio.Event)
    """Set by the first request."""
    requests: list[FakeRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    """Ids of the requests that were aborted."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        request = FakeRequest(request_id=request_id, prompt_ids=tuple(prompt_ids), params=params)
        self.requests.append(request)
        self.asked.set()
        said = self.script(decode(prompt_ids))
        try:
            await anyio.sleep(self.delay_s)
            if self.gate is not None:
                await self.gate.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(request_id)
            raise
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Generation):
            return said
        return draw(request.prompt_ids, self.draw_ids(said), params.max_tokens)

    async def recover(self) -> None:
        if self.back is not None:
            await self.back.wait()

    async def check_drawing(self, *, within_s: float) -> None:
        if self.hangs:
            raise EngineError("the engine hangs")


def draw(prompt_ids: Ids, whole: Ids, max_tokens: int) -> Generation:
    """The completion `whole`, cut after `max_tokens`."""
    ids = whole[:max_tokens]
    return Generation(
        completion_ids=ids,
        sampling_logprobs=tuple(-0.001 * (at + 1) for at in range(len(ids))),
        finish_reason="stop" if ids == whole else "length",
        weight_versions=(VersionSpan(version=1, start=0, end=len(ids)),),
        cached_tokens=len(prompt_ids) // 2,
    )


def replies(*said: str | Generation | Exception) -> Callable[[str], str | Generation | Exception]:
    """A script that says one after the other, whatever it is asked."""
    waiting = iter(said)
    return lambda prompt: next(waiting)


def tool_call(name: str, **arguments: object) -> str:
    """How the fake policy spells a tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@dataclass
class FakeRenderer:
    """In place of a `ChatRenderer`: `START role LF text END LF` a message, with recorded ids for an echoed reply."""

    stop_token_ids: Ids = (END,)

    def render(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> RenderedPrompt:
        ids = encode("".join(f"tool {tool.name}\n" for tool in conversation.tools))
        grafts: list[Graft] = []
        for index, message in enumerate(conversation.messages):
            ids += (START, *encode(f"{message.role}\n"))
            if index in recorded:
                reply = recorded[index]
                grafts.append(Graft(call_id=reply.call_id, start=len(ids), length=len(reply.completion_ids)))
                ids += tuple(reply.completion_ids)
            else:
                ids += encode(spell(message))
            ids += encode("\n") if ids[-1] == END else (END, *encode("\n"))
        ids += (START, *encode("assistant\n"))
        return RenderedPrompt(ids=PromptIds.of(ids), grafts=tuple(grafts), reencoded_replies=0)

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        return sum(len(message.text) for message in conversation.messages)

    def parse(self, completion_ids: Sequence[int]) -> ParsedResponse:
        text = decode(completion_ids)
        thoughts = re.findall(r"<think>(.*?)</think>", text, flags=re.DOTALL)
        spelled = [json.loads(found) for found in re.findall(r"<tool_call>(.*?)</tool_call>", text, flags=re.DOTALL)]
        return ParsedResponse(
            content=re.sub(r"<think>.*?</think>|<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL),
            reasoning_content="".join(thoughts),
            tool_calls=[ParsedToolCall(raw="", name=call["name"], arguments=call["arguments"]) for call in spelled],
        )


def spell(message: Message) -> str:
    """A message as text."""
    calls = "".join(tool_call(call.name, **json.loads(call.arguments)) for call in message.tool_calls)
    return message.text + calls
