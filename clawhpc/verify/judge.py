"""A judge, or several, behind OpenAI-compatible endpoints: opinions on a workspace by its task's rubric.

    prompt ─▶ request ─▶ answer ─▶ scores     one opinion; asked for again, a bounded number of times, where the
      ▲                    │                  endpoint is overloaded, failing or silent, or the answer is no verdict
      └──── wait ◀─────────┘

A judge that fails is a `VerifierError`, never a score: no opinion is made up, and a mean of fewer opinions than the
settings ask for would be another measure. A refusal is final: who asks until there is a verdict chooses among them.

It runs on the worker's host. Neither the rubric nor the key is ever in a sandbox (law 7).
"""

from __future__ import annotations

import math
import random
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from itertools import count
from statistics import fmean
from typing import Any

import anyio
import httpx2
import msgspec

from clawhpc.errors import VerifierError, ungrouped
from clawhpc.records import Judgement, Opinion, Rubric, Usage
from clawhpc.verify.prompt import BadAnswer, Case, JudgePrompt, answer_schema, judge_prompt, prompt_digest, read_answer
from clawhpc.verify.score import agreement, spread, weighted_mean
from clawhpc.verify.settings import JudgeModel, JudgeSettings

NONCE_BYTES = 16
"""Nobody guesses them."""
SCHEMA_REFUSED = frozenset({400, 422})
"""What endpoints answer that do not know `response_format`; they are asked without it."""
ASK_AGAIN = frozenset({408, 409, 425, 429})
"""Beside the server's own errors, statuses that say nothing of the request."""
MAX_REASON_CHARS = 300
"""Of an endpoint's own words, in an error."""


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
        cost = None if usage is None else model.cost_usd(usage)
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

    def __init__(self, model: JudgeModel, key: str | None, http: httpx2.AsyncClient) -> None:
        self.model = model
        self._key = key
        self._http = http
        self._takes_schema = True
        """False once it has refused a JSON schema, and answered without."""

    async def ask(self, prompt: JudgePrompt, rubric: Rubric, bill: Bill, *, timeout_s: float) -> Opinion:
        """An opinion. `Unanswered` when there is none within `timeout_s`."""
        try:
            with anyio.fail_after(timeout_s):
                response = await self._post(prompt, rubric, bill)
        except TimeoutError as error:
            raise Unanswered(f"no answer within {timeout_s:g} s") from error
        except httpx2.RequestError as error:
            raise Unanswered(self._words(f"{type(error).__name__}: {error}")) from error
        if response.status_code != httpx2.codes.OK:
            raise self._fault(response)
        return self._read(response, rubric, bill)

    async def _post(self, prompt: JudgePrompt, rubric: Rubric, bill: Bill) -> httpx2.Response:
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
            response = await self._send(told, bill)
            if response.status_code not in SCHEMA_REFUSED:
                return response
        response = await self._send(body, bill)
        if response.status_code == httpx2.codes.OK:
            self._takes_schema = False
        return response

    async def _send(self, body: dict[str, Any], bill: Bill) -> httpx2.Response:
        bill.num_requests += 1
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        return await self._http.post("chat/completions", content=msgspec.json.encode(body), headers=headers)

    def _fault(self, response: httpx2.Response) -> Unanswered:
        again = response.status_code >= 500 or response.status_code in ASK_AGAIN
        wait_s = retry_after_s(response.headers.get("retry-after", ""), time.time())
        words = self._words(response.content.decode(errors="replace"))
        return Unanswered(f"status {response.status_code}: {words}", again=again, wait_s=wait_s)

    def _read(self, response: httpx2.Response, rubric: Rubric, bill: Bill) -> Opinion:
        try:
            answer = msgspec.json.decode(response.content, type=_Answer)
            choice = answer.choices[0]
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
            words = self._words(response.content.decode(errors="replace"))
            raise Unanswered(f"no chat completion ({error}): {words}") from error
        bill.add(self.model, answer.usage.as_record() if answer.usage is not None else None)
        if choice.message.refusal or choice.finish_reason == "content_filter":
            raise Unanswered(f"it refused: {self._words(choice.message.refusal or 'content filter')}", again=False)
        try:
            return read_answer(rubric, self.model.name, choice.message.content or "")
        except BadAnswer as error:
            cut = f"cut at max_tokens={self.model.max_tokens}, " if choice.finish_reason == "length" else ""
            raise Unanswered(f"{cut}{self._words(str(error))}") from error

    def _words(self, text: str) -> str:
        """Of the endpoint's, on one line; never the key, which some repeat."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:MAX_REASON_CHARS]


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
        """One opinion, in as many attempts as it may take; each has a fence of its own."""
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
            http = httpx2.AsyncClient(
                base_url=model.base_url, proxy=model.proxy, verify=_certificates(), timeout=None, trust_env=False
            )
            key = keys[model.api_key_env] if model.api_key_env is not None else None
            endpoints.append(JudgeEndpoint(model, key, await stack.enter_async_context(http)))
        yield Judge(settings, endpoints) if endpoints else None


@cache
def _certificates() -> ssl.SSLContext:
    """Loading them takes 60 ms, so once for all."""
    return httpx2.create_ssl_context(trust_env=False)


def retry_after_s(header: str, now: float) -> float:
    """Seconds to wait, of a Retry-After header in either of its forms; 0 for one that cannot be read."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except ValueError:
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


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


# ---------------------------------------------------------------------------------------------------------------------
# A chat completion, as far as it is read
# ---------------------------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None

    def as_record(self) -> Usage:
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None
        return Usage(input_tokens=self.prompt_tokens, output_tokens=self.completion_tokens, cached_tokens=cached or 0)


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
