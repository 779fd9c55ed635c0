"""A policy that says what a scenario wants, in tokens that no encoder would choose.

What stands around it is real: the renderer with its chat format, the parser, the proxy. Only the draw is scripted: a
text becomes ids one character at a time, so that a reply that is encoded again anywhere shows in the ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import anyio
from tokenizers import Tokenizer

from clawhpc.engine.client import EngineLost, SamplingParams
from clawhpc.engine.render import RecordedReply
from clawhpc.harness.base import Harness
from clawhpc.proxy.respond import Draw, PolicyResponder, Prompt, Response
from clawhpc.records import CallRole, Conversation, Generation, LaunchPlan, LaunchRequest
from clawhpc.wire.base import ContextOverflow, ErrorKind, WireError
from tests.fakes.engine import draw

MARKUP = re.compile("(</?(?:tool_call|think)>)")
"""Where a policy draws a control token, not its letters."""
RECOVERY_S = 1.0
WAIT_S = 60.0
"""For what a reply is to come after."""
SPLIT = "✂"
"""In what is said: the character before it lacks its last token."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """One reply of the policy, or what comes in its place."""

    text: str = ""
    silence_s: float = 0.0
    """Before the first token."""
    after: Literal["", "cut", "subagent"] = ""
    """What must have happened before the first token: a connection was cut, or a subagent has its reply."""
    instead: Literal["", "refused", "overloaded", "overflow", "lost"] = ""
    """The provider's error that the harness gets, `refused` as an HTTP status and `overloaded` within a stream; or the
    engine is lost once, and back after RECOVERY_S.
    """


@dataclass
class ScriptedEngine:
    """An `Engine` that draws what was planned for each request."""

    tokenizer: Tokenizer
    said: dict[str, Said] = field(default_factory=dict)
    """By request_id."""
    drawn: dict[str, tuple[tuple[int, ...], Generation]] = field(default_factory=dict)
    """The prompt and what was drawn after it, by request_id."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        said = self.said.pop(request_id)
        if said.instead == "lost":
            raise EngineLost("the engine is gone")
        ids = (*spell(self.tokenizer, said.text), self.tokenizer.token_to_id("<|im_end|>"))
        generation = draw(tuple(prompt_ids), ids, params.max_tokens)
        self.drawn[request_id] = tuple(prompt_ids), generation
        return generation

    async def recover(self) -> None:
        await anyio.sleep(RECOVERY_S)

    async def check_drawing(self, *, within_s: float) -> None:
        """A scripted engine draws."""


def spell(tokenizer: Tokenizer, text: str) -> Iterator[int]:
    """The ids of a text, character by character."""
    for part in MARKUP.split(text):
        pieces = [part] if MARKUP.fullmatch(part) else re.findall(f"[^{SPLIT}]{SPLIT}?", part, flags=re.DOTALL)
        for piece in pieces:
            ids = tokenizer.encode(piece.removesuffix(SPLIT)).ids
            yield from ids[:-1] if piece.endswith(SPLIT) else ids


@dataclass
class ListeningHarness:
    """A harness whose calls are overheard: what each is made for tells the policy what to say."""

    inner: Harness
    heard: dict[int, tuple[CallRole, Conversation]] = field(default_factory=dict)
    """By the identity of the conversation, which is kept until its call is prepared, so that no other can have it."""
    models: set[str] = field(default_factory=set)
    """The main loop asked for them."""

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        return self.inner.launch_plan(request)

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        role, kept = self.inner.classify(headers, conversation)
        self.heard[id(conversation)] = role, conversation
        if role is CallRole.MAIN:
            self.models.add(conversation.model)
        return role, kept


@dataclass
class ScriptedPolicy:
    """A `Responder`: `inner` answers, and says what `script` has for a call of its role."""

    inner: PolicyResponder
    engine: ScriptedEngine
    harness: ListeningHarness
    script: Callable[[CallRole], Said]
    strangers: int = 0
    """The most messages of the assistant, in one history, that no reply of the policy was recognised in."""
    planned: dict[int, tuple[CallRole, Said, Prompt]] = field(default_factory=dict)
    """By the identity of the prompt, until it is answered."""
    happened: dict[str, anyio.Event] = field(kw_only=True)
    """What a reply may have to come after: see `Said`."""

    @property
    def context_window(self) -> int:
        return self.inner.context_window

    def prepare(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> Prompt:
        """Each call is prepared once; to count tokens is no call."""
        prompt = self.inner.prepare(conversation, recorded)
        if id(conversation) not in self.harness.heard:
            return prompt
        role, _ = self.harness.heard.pop(id(conversation))
        said = self.script(role)
        if said.instead == "overflow":
            raise ContextOverflow(self.context_window + 1, self.context_window)
        if said.instead == "refused":
            raise overloaded()
        unknown = sum(message.role == "assistant" for message in conversation.messages) - len(recorded)
        self.strangers = max(self.strangers, unknown)
        self.planned[id(prompt)] = role, said, prompt
        return prompt

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        return self.inner.num_new_chars(conversation, recorded)

    async def respond(self, prompt: Prompt, draw: Draw) -> Response:
        role, said, _ = self.planned.pop(id(prompt))
        if said.instead == "lost":
            self.planned[id(prompt)] = role, replace(said, instead=""), prompt
        if said.after:
            with anyio.fail_after(WAIT_S):
                await self.happened[said.after].wait()
        await anyio.sleep(said.silence_s)
        if said.instead == "overloaded":
            raise overloaded()
        self.engine.said[draw.request_id] = said
        response = await self.inner.respond(prompt, draw)
        if role is CallRole.SUBAGENT:
            self.happened["subagent"].set()
        return response

    async def recover(self) -> None:
        await self.inner.recover()

    async def check_drawing(self, *, within_s: float) -> None:
        await self.inner.check_drawing(within_s=within_s)


def overloaded() -> WireError:
    return WireError(ErrorKind.OVERLOADED, "the model is overloaded, try again later")
