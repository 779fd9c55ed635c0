"""Answers of a model behind an API, in text only: RL refuses their records, sft may imitate them.

A request that finds the endpoint overloaded, failing or out of reach is sent again, after as long as the endpoint says.
The time that takes is in the call's incidents, so that a harness whose time has run out over it has not failed itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import TracebackType

import anyio
import httpx2
import msgspec

from clawhpc.api.client import Api, ApiAnswer, NoAnswer
from clawhpc.engine.render import RecordedReply
from clawhpc.errors import EngineError, UserError
from clawhpc.proxy.respond import Draw, Prompt, Response
from clawhpc.proxy.settings import EndpointProtocol, EndpointSettings
from clawhpc.records import Conversation, Message
from clawhpc.wire.anthropic_client import AnthropicClient
from clawhpc.wire.base import Json
from clawhpc.wire.client import Answer, Ask, ClientProtocol, error_message, overflow_of
from clawhpc.wire.openai_chat_client import OpenAIChatClient

PROTOCOLS: dict[EndpointProtocol, ClientProtocol] = {"openai": OpenAIChatClient(), "anthropic": AnthropicClient()}
NO_FIT = frozenset({400, 413, 422})
"""Statuses with which providers say that a prompt does not fit."""
FIRST_WAIT_S = 1.0
"""Before a request is sent again; twice as long each further time."""
MAX_WAIT_S = 60.0
"""Whatever the endpoint says: who waits for longer has lost the rollout anyway."""
MAX_CHECK_TOKENS = 64
"""Of the reply that shows that an endpoint answers; some models refuse less than 16."""


class EndpointRefused(EngineError):
    """The endpoint does not take what it is sent: the same request would be refused again."""


class Endpoint:
    """The way to one endpoint, for all rollouts of a worker. An async context manager; one per event loop."""

    def __init__(
        self,
        settings: EndpointSettings,
        key: str | None,
        *,
        window: int,
        transport: httpx2.AsyncBaseTransport | None = None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        """`window`: what harnesses are told that the context holds, in tokens."""
        assert settings.base_url is not None, "an endpoint that is set has one"
        assert settings.model is not None, "an endpoint that is set has one"
        self.settings, self.model, self.window = settings, settings.model, window
        self._protocol = PROTOCOLS[settings.protocol]
        self._first_wait_s = first_wait_s
        self._api = Api(
            settings.base_url.rstrip("/") + self._protocol.path,
            key,
            self._protocol.headers(key),
            proxy=settings.proxy,
            transport=transport,
        )
        self._slots = anyio.CapacityLimiter(settings.max_concurrency)

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.__aexit__(kind, error, trace)

    async def ask(
        self, conversation: Conversation, ask: Ask, *, new_id: Callable[[], str], note: Callable[[str], None]
    ) -> Answer:
        """The model's reply, however often it has to be asked for; `note` hears of each time that it was in vain.

        Raises `ContextOverflow`, `WireError` for what the protocol cannot say, `EndpointRefused`, and `EngineError`
        where there is still no answer.
        """
        body = msgspec.json.encode(self._spelled(self._protocol.request_body(conversation, ask)))
        async with self._slots:
            answer = await self._post(body, note)
        try:
            return self._protocol.read_answer(answer, new_id)
        except ValueError as error:
            raise EngineError(f"{self._api.url}: {self._api.words(str(error))}") from error

    async def check(self) -> None:
        """Raise UserError where even the shortest request is refused, EngineError where none is answered."""
        conversation = Conversation(model="", messages=(Message(role="user", text="Say ok."),))
        ask = Ask(model=self.model, max_tokens=MAX_CHECK_TOKENS, temperature=1.0, seed=0)
        try:
            await self.ask(conversation, ask, new_id=str, note=lambda _: None)
        except EndpointRefused as error:
            raise UserError(f"policy.endpoint: {error}") from error

    def _spelled(self, body: Json) -> Json:
        """With the fields that this endpoint takes, as it calls them."""
        names = {"max_completion_tokens": self.settings.max_tokens_field}
        return {names.get(name, name): value for name, value in body.items() if name not in self.settings.leave_out}

    async def _post(self, body: bytes, note: Callable[[str], None]) -> bytes:
        """The body of an answer of status 200."""
        for num_tries in count(1):
            wait_s = self._first_wait_s * 2 ** (num_tries - 1)
            try:
                answer = await self._api.post(body, timeout_s=self.settings.timeout_s)
            except NoAnswer as error:
                failure = f"{self._api.url}: {error}"
            else:
                if answer.is_ok:
                    return answer.content
                failure = f"{self._api.url}: {self._judge(answer)}"
                said_s = answer.retry_after_s(time.time())
                wait_s = wait_s if said_s is None else said_s
            if num_tries > self.settings.max_retries:
                raise EngineError(f"asked {num_tries} times in vain, at last {failure}")
            wait_s = min(wait_s, MAX_WAIT_S)
            note(f"try {num_tries} was in vain: {failure}; the next one after {wait_s:.1f} s")
            await anyio.sleep(wait_s)
        raise AssertionError("a count has no end")

    def _judge(self, answer: ApiAnswer) -> str:
        """What went wrong, where the same may be sent again; else it is raised."""
        message = error_message(answer.content)
        failure = f"{answer.status} {self._api.words(message)}"
        if answer.passes:
            return failure
        if answer.status in NO_FIT and (overflow := overflow_of(message, self.window)) is not None:
            raise overflow
        raise EndpointRefused(f"{self._api.url} refuses what it is sent: {failure}")


@dataclass(frozen=True, kw_only=True)
class EndpointResponder:
    """Answers the calls of rollouts from an endpoint; what decides the draws is the campaign's, as with the policy."""

    endpoint: Endpoint
    max_tokens: int
    """Of one reply."""
    temperature: float

    @property
    def context_window(self) -> None:
        """None: only the endpoint knows it."""

    def prepare(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> Prompt:
        """The conversation as it is."""
        return Prompt(conversation=conversation, rendered=None, temperature=self.temperature)

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        """None: nothing is encoded."""
        return 0

    async def respond(self, prompt: Prompt, draw: Draw) -> Response:
        """Ask. Raises as `Endpoint.ask`."""
        bounds = [draw.max_tokens, self.max_tokens, prompt.conversation.sampling.max_tokens or self.max_tokens]
        ask = Ask(
            model=self.endpoint.model, max_tokens=max(1, min(bounds)), temperature=self.temperature, seed=draw.seed
        )
        new_id = partial(next, (f"call_{draw.call_id}_{at}" for at in count()))
        start = anyio.current_time()
        answer = await self.endpoint.ask(prompt.conversation, ask, new_id=new_id, note=draw.note)
        return Response(
            reply=answer.reply,
            generation=None,
            usage=answer.usage,
            model=answer.model or self.endpoint.model,
            engine_s=anyio.current_time() - start,
        )

    async def recover(self) -> None:
        """Each request sees to that itself."""

    async def check_drawing(self, *, within_s: float) -> None:
        """An endpoint that is long is taken at its word; what was in vain is in the call's incidents."""
