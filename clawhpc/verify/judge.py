"""A judge, or several, behind OpenAI-compatible endpoints: opinions on a workspace by its task's rubric.

    prompt ─▶ request ─▶ answer ─▶ scores     one opinion; asked for again, a bounded number of times, where the
      ▲                    │                  endpoint is overloaded, failing or silent, or the answer is no verdict;
      └──── wait ◀─────────┘                  and with half as much to read where that does not fit its window

A judge that fails is a `VerifierError`, never a score: no opinion is made up, and a mean of fewer opinions than the
settings ask for would be another measure. A refusal is final: who asks until there is a verdict chooses among them.

It runs on the worker's host. Neither the rubric nor the key is ever in a sandbox (law 7).
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean
from typing import Any

import anyio
import msgspec

from clawhpc.api.client import Api, ApiAnswer, NoAnswer
from clawhpc.errors import VerifierError, ungrouped
from clawhpc.records import Judgement, Opinion, Rubric, Usage
from clawhpc.verify.prompt import (
    BadAnswer,
    Case,
    JudgePrompt,
    answer_schema,
    judge_prompt,
    narrow,
    prompt_digest,
    read_answer,
)
from clawhpc.verify.score import agreement, spread, weighted_mean
from clawhpc.verify.settings import JudgeModel, JudgeSettings
from clawhpc.wire.client import error_message, overflow_of
from clawhpc.wire.openai_chat_client import OpenAIChatClient, read_completion

CHAT = OpenAIChatClient()
NONCE_BYTES = 16
"""Nobody guesses them."""
SCHEMA_REFUSED = frozenset({400, 422})
"""What endpoints answer that do not know `response_format`; they are asked without it."""
NO_FIT = frozenset({400, 413, 422})
"""What endpoints answer to a prompt that is too long for them."""
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Of the room for what the policy wrote, one after the other, while the prompt is too long: whoever wrote most would
have no verdict else. By default the last is 8.5 kB.
"""


class DoesNotFit(Exception):
    """A prompt that is too long for the endpoint."""


class Unanswered(Exception):
    """A request that brought no opinion."""

    def __init__(self, reason: str, *, again: bool = True, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.again = again
        """Asked once more, it may bring one."""
        self.wait_s = wait_s
        """As the endpoint would have it."""


@dataclass
class Bill:
    """What one judgement has cost so far."""

    num_requests: int = 0
    usage: Usage = field(default_factory=lambda: Usage(input_tokens=0, output_tokens=0))
    cost_usd: float | None = 0.0
    last_fault: str = ""

    def add(self, model: JudgeModel, usage: Usage | None) -> None:
        """One answer; None where its endpoint does not say what it took."""
        cost = model.cost_usd(usage) if usage is not None and model.are_known else None
        self.cost_usd = None if cost is None or self.cost_usd is None else self.cost_usd + cost
        if usage is not None:
            self.usage = Usage(
                input_tokens=self.usage.input_tokens + usage.input_tokens,
                output_tokens=self.usage.output_tokens + usage.output_tokens,
                cached_tokens=self.usage.cached_tokens + usage.cached_tokens,
            )

    def __str__(self) -> str:
        tokens = self.usage.input_tokens + self.usage.output_tokens
        cost = "" if self.cost_usd is None else f", {self.cost_usd:.4f} USD"
        return f"{self.num_requests} requests, {tokens} tokens{cost}"


class JudgeEndpoint:
    """One model, asked over HTTP."""

    def __init__(self, model: JudgeModel, api: Api) -> None:
        self.model = model
        self._api = api
        self._takes_schema = True
        """False once it has refused a JSON schema, and answered without."""

    async def ask(self, prompt: JudgePrompt, rubric: Rubric, bill: Bill, *, timeout_s: float) -> Opinion:
        """An opinion. `Unanswered` when there is none within `timeout_s`, `DoesNotFit` when there cannot be one."""
        try:
            with anyio.fail_after(timeout_s):  # of both requests together, where there are two
                answer = await self._post(prompt, rubric, bill, timeout_s)
        except (NoAnswer, TimeoutError) as error:
            raise Unanswered(str(error) or f"no answer within {timeout_s:g} s") from error
        if not answer.is_ok:
            words = self._api.words(answer.content.decode(errors="replace"))
            fault = f"status {answer.status}: {words}"
            if answer.status in NO_FIT and overflow_of(error_message(answer.content), window=0) is not None:
                raise DoesNotFit(fault)
            raise Unanswered(fault, again=answer.passes, wait_s=answer.retry_after_s(time.time()) or 0.0)
        return self._read(answer.content, rubric, bill)

    async def _post(self, prompt: JudgePrompt, rubric: Rubric, bill: Bill, timeout_s: float) -> ApiAnswer:
        """The answer to a request with a schema, or without where the endpoint does not know them."""
        body: dict[str, Any] = {
            "model": self.model.name,
            "messages": [{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}],
            self.model.max_tokens_field: self.model.max_tokens,
        }
        if self.model.temperature is not None:
            body["temperature"] = self.model.temperature
        if self._takes_schema:
            named = {"name": "scores", "strict": True, "schema": answer_schema(rubric)}
            told = {**body, "response_format": {"type": "json_schema", "json_schema": named}}
            answer = await self._send(told, bill, timeout_s)
            if answer.status not in SCHEMA_REFUSED:
                return answer
        answer = await self._send(body, bill, timeout_s)
        if answer.is_ok:
            self._takes_schema = False
        return answer

    async def _send(self, body: dict[str, Any], bill: Bill, timeout_s: float) -> ApiAnswer:
        bill.num_requests += 1
        return await self._api.post(msgspec.json.encode(body), timeout_s=timeout_s)

    def _read(self, content: bytes, rubric: Rubric, bill: Bill) -> Opinion:
        try:
            completion = read_completion(content)
        except ValueError as error:
            raise Unanswered(self._api.words(str(error))) from error
        bill.add(self.model, completion.counted)
        choice = completion.choices[0]
        if choice.message.refusal or choice.finish_reason == "content_filter":
            words = self._api.words(choice.message.refusal or "content filter")
            raise Unanswered(f"it refused: {words}", again=False)
        try:
            return read_answer(rubric, self.model.name, choice.message.content or "")
        except BadAnswer as error:
            cut = f"cut at max_tokens={self.model.max_tokens}, " if choice.finish_reason == "length" else ""
            raise Unanswered(f"{cut}{self._api.words(str(error))}") from error


class Judge:
    """Asks every model of its settings for its opinions. Use one per event loop, by `open_judge`."""

    def __init__(self, settings: JudgeSettings, endpoints: Sequence[JudgeEndpoint]) -> None:
        self.settings = settings
        self._endpoints = endpoints

    async def judge(self, case: Case, *, timeout_s: float) -> Judgement:
        """What all say of `case`. `VerifierError` when one of them does not, or not in time."""
        bill = Bill()
        asked = [endpoint for endpoint in self._endpoints for _ in range(self.settings.repeats)]
        opinions: dict[int, Opinion] = {}

        async def ask(place: int, endpoint: JudgeEndpoint) -> None:
            opinions[place] = await self._ask(endpoint, case, bill)

        try:
            with anyio.fail_after(timeout_s), ungrouped():
                async with anyio.create_task_group() as tasks:
                    for place, endpoint in enumerate(asked):
                        tasks.start_soon(ask, place, endpoint)
        except TimeoutError as error:
            last = f"; last: {bill.last_fault}" if bill.last_fault else ""
            raise VerifierError(f"the judge gave no verdict within {timeout_s:.0f} s ({bill}){last}") from error
        return _judgement(case.rubric, [opinions[place] for place in range(len(asked))], bill)

    async def _ask(self, endpoint: JudgeEndpoint, case: Case, bill: Bill) -> Opinion:
        """One opinion, on as much of what the policy wrote as the endpoint's window holds."""
        for share in SHARES:
            try:
                opinion = await self._ask_on(endpoint, narrow(case, self.settings, share), bill)
                return replace(opinion, shown=share)
            except DoesNotFit as fault:
                bill.last_fault = f"judge {endpoint.model.name}: {fault}"
        raise VerifierError(f"{bill.last_fault}, though no more than {share:g} of it was shown ({bill})")

    async def _ask_on(self, endpoint: JudgeEndpoint, case: Case, bill: Bill) -> Opinion:
        """One opinion on `case`, in as many attempts as it may take; each has a fence of its own."""
        for attempt in count(1):
            prompt = judge_prompt(case, secrets.token_hex(NONCE_BYTES))
            try:
                return await endpoint.ask(prompt, case.rubric, bill, timeout_s=self.settings.request_s)
            except Unanswered as fault:
                bill.last_fault = f"judge {endpoint.model.name}: {fault}"
                wait_s = max(fault.wait_s, self.settings.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
                if not fault.again or attempt == self.settings.max_attempts:
                    raise VerifierError(f"{bill.last_fault} ({bill})") from fault
                if anyio.current_time() + wait_s > anyio.current_effective_deadline():
                    late = f"it may be asked again in {wait_s:.0f} s, which is after the rollout's time"
                    raise VerifierError(f"{bill.last_fault}; {late} ({bill})") from fault
            await anyio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


@asynccontextmanager
async def open_judge(settings: JudgeSettings, keys: Mapping[str, str]) -> AsyncIterator[Judge | None]:
    """The judge of a worker; None where the settings name no model. `keys`: see `judge_keys`."""
    async with AsyncExitStack() as stack:
        endpoints = []
        for model in settings.models.values():
            key = keys[model.api_key_env] if model.api_key_env is not None else None
            url = model.base_url.rstrip("/") + CHAT.path
            api = await stack.enter_async_context(Api(url, key, CHAT.headers(key), proxy=model.proxy))
            endpoints.append(JudgeEndpoint(model, api))
        yield Judge(settings, endpoints) if endpoints else None


def _judgement(rubric: Rubric, opinions: Sequence[Opinion], bill: Bill) -> Judgement:
    values = [weighted_mean(rubric, opinion.scores) for opinion in opinions]
    return Judgement(
        opinions=tuple(opinions),
        score=fmean(values),
        agreement=agreement(values),
        spread=spread(opinions),
        prompt_digest=prompt_digest(rubric),
        num_requests=bill.num_requests,
        usage=bill.usage,
        cost_usd=bill.cost_usd,
    )
