"""Token ids in, token ids out: a client of vLLM's server on a unix socket.

The ids and log-probs of a call are those of the engine's own final answer (`/inference/v1/generate`), never pieced
together from a stream. An answer that breaks the token contract is refused: `EngineError`, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import anyio
import httpx2
import msgspec

from clawhpc.engine.ids import PromptIds
from clawhpc.engine.transport import UnixTransport
from clawhpc.errors import EngineError
from clawhpc.records import FinishReason, Generation, VersionSpan

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
LOWEST_LOGPROB = -9999.0
"""What vLLM sends in place of -inf and NaN, and where it has no value: no sampled token can have it."""
HEALTH_S = 10.0
"""A server that is well says so at once, one that has died is refused at once; more is a hang."""
RANK_HEADER = "X-data-parallel-rank"
"""Which copy of the policy a request is for, where one server has several."""
KEEPALIVE_S = 2.0
"""Idle connections are dropped before the server drops them (5 s), so that no request is written to a closed one."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw one completion."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class Engine(Protocol):
    """Draws completions from the current policy."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        """What the policy draws after `prompt_ids`, however long that takes.

        Cancelling the scope aborts the request in the engine. Raises `PromptTooLong` where no token fits after the
        prompt, `EngineLost` where it may be asked again, `EngineError` for every other failure.
        """
        ...

    async def recover(self) -> None:
        """Return when an engine that was lost can be asked again, however long that takes.

        Raises EngineError when it does not come back.
        """
        ...

    async def check_drawing(self, *, within_s: float) -> None:
        """Raise EngineError unless the engine answers anybody, within this time before or after the call."""
        ...


class EngineLost(EngineError):
    """The engine went away, or let go of a request, before it was answered: asked again, it may well draw it."""


class PromptTooLong(EngineError):
    """No token fits after the prompt."""

    def __init__(self, *, num_tokens: int, maximum: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens; the engine holds {maximum}, at least one of them drawn")
        self.num_tokens = num_tokens
        """Of the prompt."""
        self.maximum = maximum
        """Of prompt and completion together."""


class VllmEngine:
    """An `Engine` over a vLLM server. An async context manager; use one per event loop.

    The server must run with `--logprobs-mode processed_logprobs`: log-probs are then those of the distribution that the
    token was drawn from, after temperature, and not of the raw logits.

    A request has no time limit of its own unless it names one: how long a completion may take, whoever waits for it
    knows.
    """

    def __init__(
        self,
        socket: Path,
        *,
        max_model_len: int,
        num_token_ids: int,
        rank: int = 0,
        explain: Callable[[], str] = lambda: "",
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`num_token_ids`: ids that the tokenizer knows; the head may be padded beyond.

        `rank`: of the copies of the policy that the server has, the one that draws and scores. Posts reach all of them.
        `explain`: what is known of a failure beyond the engine's answer, such as the end of its log.
        """
        self._http = httpx2.AsyncClient(
            base_url="http://engine",
            headers={RANK_HEADER: str(rank)},
            transport=transport or UnixTransport(socket, idle_s=KEEPALIVE_S),
            timeout=None,
            trust_env=False,
        )
        self._max_model_len = max_model_len
        self._num_token_ids = num_token_ids
        self._explain = explain
        self._distrust = ""
        self._answered_at = -math.inf
        self._num_checks = count()

    async def __aenter__(self) -> VllmEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def distrust(self, reason: str) -> None:
        """Refuse what the engine draws from now on, calls in flight included; the empty reason trusts it again."""
        self._distrust = reason

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str) -> Generation:
        """See `Engine`. `max_tokens` is cut to what the engine's window leaves after the prompt."""
        prompt = PromptIds.of(prompt_ids)
        self._check_prompt(prompt)
        self._check_trust()
        room = self._max_model_len - len(prompt)
        sampling = {
            "max_tokens": min(params.max_tokens, room),
            "temperature": params.temperature,
            "seed": params.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "logprobs": 0,
        }
        answer = await self._ask(prompt, sampling, request_id)
        self._check_trust()
        return _generation(answer, self._num_token_ids)

    async def recover(self) -> None:
        """See `Engine`. Nobody starts this one again: it is well, or it does not come back."""
        await self.check_health(timeout_s=HEALTH_S)

    async def check_drawing(self, *, within_s: float) -> None:
        """See `Engine`. Asks for one token where nobody has been answered lately: vLLM's `/health` sees no hang."""
        if anyio.current_time() - self._answered_at <= within_s:
            return
        try:
            with anyio.fail_after(within_s):
                await self.generate((0,), SamplingParams(max_tokens=1), request_id=f"check-{next(self._num_checks)}")
        except TimeoutError as error:
            raise EngineError(f"the engine hangs: no token within {within_s:g} s{self._more()}") from error

    async def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """The log-prob of each of `token_ids[1:]` given those before it, at temperature 1, over the whole head."""
        prompt = PromptIds.of(token_ids)
        self._check_prompt(prompt)
        answer = await self._ask(prompt, {"max_tokens": 1, "prompt_logprobs": 0}, "score")
        scores = answer.prompt_logprobs or []
        if len(scores) != len(token_ids):
            raise EngineError(f"the engine scored {len(scores)} of {len(token_ids)} tokens")
        return tuple(_score_of(score, token) for score, token in zip(scores[1:], token_ids[1:], strict=True))

    async def post(
        self, path: str, *, body: Any = None, query: dict[str, str] | None = None, timeout_s: float = math.inf
    ) -> bytes:
        """What any route of the server answers. EngineError when it fails, is gone, or takes over `timeout_s`."""
        return await self._send("POST", path, body=body, query=query, timeout_s=timeout_s)

    async def check_health(self, *, timeout_s: float) -> None:
        """Raise EngineError unless the server answers that it is well."""
        await self._send("GET", "/health", timeout_s=timeout_s)

    async def _ask(self, prompt: PromptIds, sampling: dict[str, Any], request_id: str) -> _Answer:
        rest = msgspec.json.encode({"sampling_params": sampling, "request_id": request_id})
        body = msgspec.Raw(b'{"token_ids":%b,%b' % (prompt.json, rest[1:]))  # what is known of it is encoded already
        content = await self.post("/inference/v1/generate", body=body)
        self._answered_at = anyio.current_time()
        try:
            return msgspec.json.decode(content, type=_Answer)
        except msgspec.MsgspecError as error:
            raise EngineError(f"the engine answered what this client cannot read: {error}") from error

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
        timeout_s: float = math.inf,
    ) -> bytes:
        try:
            with anyio.fail_after(timeout_s):
                content = None if body is None else msgspec.json.encode(body)
                headers = {} if body is None else {"content-type": "application/json"}
                response = await self._http.request(method, path, content=content, headers=headers, params=query)
        except TimeoutError as error:
            raise EngineError(f"the engine gave no answer to {path} within {timeout_s:g} s{self._more()}") from error
        except httpx2.TransportError as error:
            raise EngineLost(f"the engine is gone: {type(error).__name__} at {path}{self._more()}") from error
        answered = f"the engine answered {response.status_code} to {path}: {_reason(response.content)}"
        if response.is_server_error:  # all that a server says whose core has died
            raise EngineLost(answered + self._more())
        if response.status_code != httpx2.codes.OK:
            raise EngineError(answered)
        return response.content

    def _more(self) -> str:
        known = self._explain()
        return f"; {known}" if known else ""

    def _check_prompt(self, prompt: PromptIds) -> None:
        """Without a tokenizer of its own, vLLM dies of an id that it does not know."""
        if not prompt:
            raise EngineError("the prompt is empty")
        if prompt.lowest < 0 or prompt.highest >= self._num_token_ids:
            raise EngineError(f"the prompt has ids outside 0..{self._num_token_ids - 1}")
        if len(prompt) >= self._max_model_len:
            raise PromptTooLong(num_tokens=len(prompt), maximum=self._max_model_len)

    def _check_trust(self) -> None:
        if self._distrust:
            raise EngineError(f"{self._distrust}{self._more()}")


# ---------------------------------------------------------------------------------------------------------------------
# vLLM's answer, as far as it is read
# ---------------------------------------------------------------------------------------------------------------------


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Score(msgspec.Struct):
    logprob: float


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    prompt_logprobs: list[dict[int, _Score] | None] | None = None


class _Fault(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Fault


def _reason(content: bytes) -> str:
    """What vLLM says about a request that it did not answer, on one line."""
    try:
        text = msgspec.json.decode(content, type=_Refusal).error.message
    except msgspec.MsgspecError:
        text = content.decode(errors="replace")
    return " ".join(text.split())[:500]


def _generation(answer: _Answer, num_token_ids: int) -> Generation:
    """The answer as a record, or EngineError for one that breaks law 1 or 9."""
    if len(answer.choices) != 1:
        raise EngineError(f"the engine gave {len(answer.choices)} completions for one request")
    choice = answer.choices[0]
    if choice.finish_reason not in FINISH_REASONS:
        raise EngineError(f"the engine finished for the unknown reason {choice.finish_reason!r}")
    strange = [token for token in choice.token_ids if not 0 <= token < num_token_ids]
    if strange:
        raise EngineError(f"the engine drew id {strange[0]}; the tokenizer has {num_token_ids} ids")
    details = answer.usage.prompt_tokens_details
    try:
        return Generation(
            completion_ids=tuple(choice.token_ids),
            sampling_logprobs=_sampling_logprobs(choice),
            finish_reason=FINISH_REASONS[choice.finish_reason],
            weight_versions=tuple(_version_span(span) for span in choice.weight_versions or []),
            cached_tokens=(details.cached_tokens or 0) if details else 0,
        )
    except ValueError as error:
        raise EngineError(f"the engine's answer is unfit for training: {error}") from error


def _sampling_logprobs(choice: _Choice) -> tuple[float, ...]:
    content = (choice.logprobs and choice.logprobs.content) or []
    if [entry.token_id for entry in content] != choice.token_ids:
        raise EngineError(
            f"the engine's log-probs are not those of its tokens: {len(content)} for {len(choice.token_ids)} tokens"
        )
    logprobs = tuple(entry.logprob for entry in content)
    if not all(math.isfinite(value) and value > LOWEST_LOGPROB for value in logprobs):
        raise EngineError("the engine has no log-prob for a token that it drew")
    return logprobs


def _version_span(span: _Span) -> VersionSpan:
    if not span.version.isdecimal():
        raise EngineError(f"the engine drew with weights {span.version!r}, which are no published policy")
    return VersionSpan(version=int(span.version), start=span.start, end=span.end)


def _score_of(score: dict[int, _Score] | None, token_id: int) -> float:
    if score is None or token_id not in score:
        raise EngineError(f"the engine did not score token {token_id}")
    return score[token_id].logprob
