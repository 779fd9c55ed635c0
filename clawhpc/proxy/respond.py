"""What answers a call: the policy behind the engine, or a script; a model behind an API is in `endpoint`.

Answering has two stages. `prepare` turns the conversation into a prompt, so that the true number of input tokens, and a
prompt that does not fit, are known before the first byte is sent. `respond` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

import anyio

from clawhpc.engine.client import Engine, EngineLost, PromptTooLong, SamplingParams
from clawhpc.engine.parse import find_stop, parse_reply
from clawhpc.engine.render import ChatRenderer, RecordedReply, RenderedPrompt
from clawhpc.records import Conversation, Generation, Reply, Usage
from clawhpc.wire.base import ContextOverflow

NO_USAGE = Usage(input_tokens=0, output_tokens=0)
"""Of an answer that no model has given, and of none."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation, ready to be answered."""

    conversation: Conversation
    rendered: RenderedPrompt | None
    """None when no tokens are involved."""
    temperature: float | None = None
    """That it will be answered at, whatever was asked for; None for a script."""

    @property
    def num_tokens(self) -> int:
        """What the engine will receive; 0 when no tokens are involved."""
        return len(self.rendered.ids) if self.rendered else 0


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What a session asks of one answer."""

    call_id: int
    request_id: str
    """Unique in the engine."""
    seed: int
    max_tokens: int
    """What is left of the rollout's budget."""
    note: Callable[[str], None] = lambda incident: None
    """Hears what goes wrong on the way, although the call is answered: see `CallRecord.incidents`."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """The answer to one prompt."""

    reply: Reply
    generation: Generation | None
    """None for a text-only answer."""
    usage: Usage = NO_USAGE
    """What the engine received and drew, or what an endpoint has counted; zeros for a script."""
    model: str = ""
    """See `CallRecord`."""
    engine_s: float = 0.0
    """The wait for the engine."""


class Responder(Protocol):
    """Answers the calls of any number of sessions."""

    @property
    def context_window(self) -> int | None:
        """Tokens that prompt and completion may have together; None when no tokens are involved."""
        ...

    def prepare(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> Prompt:
        """The prompt; `recorded` gives the ids of the replies that stand in it, by index into the messages.

        Waits for nothing, and may be called from several threads at once. Raises `ContextOverflow`.
        """
        ...

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        """How much text `prepare` would have to encode, about."""
        ...

    async def respond(self, prompt: Prompt, draw: Draw) -> Response:
        """The answer. Cancelling the scope aborts it in the engine.

        Raises `EngineError`, and `ContextOverflow` where only the engine knows its window. After `EngineLost` the same
        may be asked again, once `recover` has returned.
        """
        ...

    async def recover(self) -> None:
        """See `Engine.recover`."""
        ...

    async def check_drawing(self, *, within_s: float) -> None:
        """Raise `EngineError` where it is no answer's length, but a hang, that keeps answers back."""
        ...


@dataclass(frozen=True, kw_only=True)
class PolicySampling:
    """How the policy is sampled: the campaign's choice, whatever a harness asks for."""

    context_window: int
    """Tokens that prompt and completion may have together."""
    max_tokens: int = 4096
    """Tokens of one completion."""
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PolicyResponder:
    """Token ids in, token ids out: the only source of training data (law 1)."""

    engine: Engine
    renderer: ChatRenderer
    sampling: PolicySampling

    @property
    def context_window(self) -> int:
        """The campaign's."""
        return self.sampling.context_window

    def prepare(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> Prompt:
        """Render. A prompt that leaves no room for one token does not fit."""
        rendered = self.renderer.render(conversation, recorded)
        if len(rendered.ids) >= self.sampling.context_window:
            raise ContextOverflow(len(rendered.ids), self.sampling.context_window)
        return Prompt(conversation=conversation, rendered=rendered, temperature=self.sampling.temperature)

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        """See `ChatRenderer.num_new_chars`."""
        return self.renderer.num_new_chars(conversation, recorded)

    async def respond(self, prompt: Prompt, draw: Draw) -> Response:
        """Draw, and decode what was drawn."""
        assert prompt.rendered is not None, "a policy answers rendered prompts"
        params = self._params(prompt, draw)
        start = anyio.current_time()
        try:
            generation = await self.engine.generate(prompt.rendered.ids, params, request_id=draw.request_id)
        except PromptTooLong as error:
            raise ContextOverflow(error.num_tokens, error.maximum) from error
        engine_s = anyio.current_time() - start
        if generation.finish_reason == "cancelled":
            raise EngineLost(f"the engine gave up request {draw.request_id}")
        stopped = find_stop(self.renderer, generation.completion_ids, prompt.conversation.sampling.stop)
        if stopped is not None:
            generation = generation.until(stopped[0])
        reply = parse_reply(
            self.renderer,
            generation.completion_ids,
            generation.finish_reason,
            new_id=partial(next, (f"call_{draw.call_id}_{at}" for at in count())),
            stop_sequence=stopped[1] if stopped else "",
        )
        usage = Usage(
            input_tokens=prompt.num_tokens,
            output_tokens=len(generation.completion_ids),
            cached_tokens=generation.cached_tokens,
        )
        return Response(reply=reply, generation=generation, usage=usage, engine_s=engine_s)

    async def recover(self) -> None:
        """See `Engine.recover`."""
        await self.engine.recover()

    async def check_drawing(self, *, within_s: float) -> None:
        """See `Engine.check_drawing`."""
        await self.engine.check_drawing(within_s=within_s)

    def _params(self, prompt: Prompt, draw: Draw) -> SamplingParams:
        """What the harness asked for counts only where it asks for fewer tokens."""
        bounds = [draw.max_tokens, self.sampling.max_tokens, self.sampling.context_window - prompt.num_tokens]
        requested = prompt.conversation.sampling.max_tokens
        if requested is not None:
            bounds.append(requested)
        return SamplingParams(
            max_tokens=max(1, min(bounds)),
            temperature=self.sampling.temperature,
            seed=draw.seed,
            stop_token_ids=self.renderer.stop_token_ids,
        )


@dataclass(frozen=True, kw_only=True)
class ScriptedResponder:
    """Answers from a function, in text only: the oracle of a cold start. RL refuses its records."""

    script: Callable[[Conversation], Reply]

    @property
    def context_window(self) -> None:
        """None: no tokens are involved."""

    def prepare(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> Prompt:
        """The conversation as it is."""
        return Prompt(conversation=conversation, rendered=None)

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        """None: nothing is encoded."""
        return 0

    async def respond(self, prompt: Prompt, draw: Draw) -> Response:
        """What the script says."""
        return Response(reply=self.script(prompt.conversation), generation=None)

    async def recover(self) -> None:
        """A script is never lost."""

    async def check_drawing(self, *, within_s: float) -> None:
        """A script does not hang."""
