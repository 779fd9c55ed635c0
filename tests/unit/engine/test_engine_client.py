"""The client refuses every answer that breaks the token contract, and says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from clawhpc.engine.client import PromptTooLong, SamplingParams, VllmEngine
from clawhpc.errors import EngineError
from clawhpc.records import Generation, VersionSpan

pytestmark = pytest.mark.anyio
NUM_TOKEN_IDS = 100
MAX_MODEL_LEN = 16
Answer = dict[str, Any]


def answer(ids: list[int], **changes: Any) -> Answer:
    """What vLLM answers when it has drawn `ids` with policy step 3."""
    content = [{"token_id": token, "logprob": -0.5 * token, "rank": 1} for token in ids]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "weight_versions": [{"version": "3", "start": 0, "end": len(ids)}],
    }
    return {"choices": [choice | changes], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


def engine(handler: Callable[[httpx2.Request], Any], **settings: Any) -> VllmEngine:
    return VllmEngine(
        Path("/run/engine"),
        max_model_len=MAX_MODEL_LEN,
        num_token_ids=NUM_TOKEN_IDS,
        transport=httpx2.MockTransport(handler),
        explain=lambda: "ValueError: no memory (log: /run/engine.log)",
        **settings,
    )


async def ask(reply: Answer | httpx2.Response, prompt: tuple[int, ...] = (1, 2, 3)) -> Generation:
    response = reply if isinstance(reply, httpx2.Response) else httpx2.Response(200, json=reply)
    async with engine(lambda _: response) as client:
        return await client.generate(prompt, SamplingParams(max_tokens=5), request_id="r")


async def test_an_answer_becomes_a_generation() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    generation = await ask(answer([7, 8], weight_versions=spans))
    assert generation == Generation(
        completion_ids=(7, 8),
        sampling_logprobs=(-3.5, -4.0),
        finish_reason="stop",
        weight_versions=(VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)),
        cached_tokens=2,
    )


async def test_an_empty_completion_is_an_answer() -> None:
    generation = await ask(answer([], finish_reason="abort", weight_versions=None, logprobs=None))
    assert (generation.completion_ids, generation.finish_reason) == ((), "cancelled")


async def test_the_request_says_what_is_to_be_drawn() -> None:
    bodies: list[Any] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        return httpx2.Response(200, json=answer([7]))

    params = SamplingParams(max_tokens=5, temperature=0.7, seed=11, stop_token_ids=(9,))
    async with engine(handler) as client:
        await client.generate((1, 2), params, request_id="rollout-1")
    assert bodies == [
        {
            "token_ids": [1, 2],
            "request_id": "rollout-1",
            "sampling_params": {
                "max_tokens": 5,
                "temperature": 0.7,
                "seed": 11,
                "stop_token_ids": [9],
                "logprobs": 0,
            },
        }
    ]


async def test_max_tokens_is_cut_to_the_room_after_the_prompt() -> None:
    bodies: list[Any] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        bodies.append(json.loads(request.content))
        return httpx2.Response(200, json=answer([7]))

    async with engine(handler) as client:
        await client.generate((1,) * 14, SamplingParams(max_tokens=5), request_id="r")
    assert bodies[0]["sampling_params"]["max_tokens"] == 2


BROKEN: dict[str, tuple[Answer, str]] = {
    "a log-prob too few": (
        answer([7, 8], logprobs={"content": [{"token_id": 7, "logprob": -1.0}]}),
        "1 for 2 tokens",
    ),
    "log-probs of other tokens": (
        answer([7], logprobs={"content": [{"token_id": 8, "logprob": -1.0}]}),
        "not those of its tokens",
    ),
    "no log-probs": (answer([7], logprobs=None), "0 for 1 tokens"),
    "a clamped log-prob": (
        answer([7], logprobs={"content": [{"token_id": 7, "logprob": -9999.0}]}),
        "no log-prob for a token",
    ),
    "no weight versions": (answer([7], weight_versions=None), "cover 0 of 1"),
    "a gap between versions": (
        answer([7, 8], weight_versions=[{"version": "3", "start": 1, "end": 2}]),
        "gap or overlap",
    ),
    "weights that nobody published": (
        answer([7], weight_versions=[{"version": "default", "start": 0, "end": 1}]),
        "no published policy",
    ),
    "a padded id": (answer([100]), "drew id 100; the tokenizer has 100 ids"),
    "a negative id": (answer([-5]), "drew id -5; the tokenizer has 100 ids"),
    "an unknown end": (answer([7], finish_reason="error"), "unknown reason 'error'"),
    "two completions": ({**answer([7]), "choices": answer([7])["choices"] * 2}, "2 completions"),
    "another form": ({"choices": [{}]}, "cannot read"),
}


@pytest.mark.parametrize(("reply", "reason"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_answer_is_refused_with_the_reason(reply: Answer, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        await ask(reply)


@pytest.mark.parametrize("length", [16, 17])
async def test_a_prompt_that_leaves_no_room_is_told_with_its_numbers(length: int) -> None:
    with pytest.raises(PromptTooLong) as caught:
        await ask(answer([7]), (1,) * length)
    assert (caught.value.num_tokens, caught.value.maximum) == (length, MAX_MODEL_LEN)


@pytest.mark.parametrize("prompt", [(), (100,), (-1,)])
async def test_a_prompt_that_would_kill_the_engine_is_not_sent(prompt: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match="the prompt"):
        await ask(answer([7]), prompt)


async def test_a_refusal_carries_the_engines_words() -> None:
    refusal = httpx2.Response(400, json={"error": {"message": "top_p must be\nin (0, 1]", "code": 400}})
    with pytest.raises(EngineError, match=r"answered 400 .*: top_p must be in \(0, 1\]$"):
        await ask(refusal)


async def test_a_failure_without_words_is_told_as_it_is() -> None:
    with pytest.raises(EngineError, match=r"answered 500 .*: Internal Server Error; ValueError: no memory"):
        await ask(httpx2.Response(500, text="Internal Server Error"))


async def test_a_dead_engine_is_named() -> None:
    def handler(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    async with engine(handler) as client:
        with pytest.raises(
            EngineError, match=r"the engine is gone: ConnectError .*; ValueError: no memory .*engine\.log"
        ):
            await client.generate((1,), SamplingParams(max_tokens=1), request_id="r")


async def test_a_silent_engine_is_given_up() -> None:
    async def handler(request: httpx2.Request) -> httpx2.Response:
        await anyio.sleep_forever()
        raise AssertionError

    async with engine(handler) as client:
        with pytest.raises(EngineError, match=r"no answer to /health within 0.01 s"):
            await client.check_health(timeout_s=0.01)
        with pytest.raises(EngineError, match=r"the engine hangs: no token within 0.01 s; ValueError: no memory"):
            await client.check_drawing(within_s=0.01)


async def test_an_engine_draws_that_has_answered_lately_or_gives_a_token_when_asked() -> None:
    asked: list[Any] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        asked.append(json.loads(request.content))
        return httpx2.Response(200, json=answer([7]))

    async with engine(handler) as client:
        await client.check_drawing(within_s=5)
        await client.check_drawing(within_s=5)
        assert [body["sampling_params"]["max_tokens"] for body in asked] == [1]
        await client.check_drawing(within_s=-1)
        assert asked[0]["request_id"] != asked[1]["request_id"]


async def test_what_a_distrusted_engine_draws_is_refused_also_in_flight() -> None:
    async with engine(lambda _: httpx2.Response(200, json=answer([7]))) as client:

        def handler(request: httpx2.Request) -> httpx2.Response:
            client.distrust("weights of step 4 did not load")
            return httpx2.Response(200, json=answer([7]))

        client._http._transport = httpx2.MockTransport(handler)
        for _ in range(2):
            with pytest.raises(EngineError, match="weights of step 4 did not load"):
                await client.generate((1,), SamplingParams(max_tokens=1), request_id="r")


async def test_scores_are_those_of_the_tokens_after_the_first() -> None:
    scores = [None, {"5": {"logprob": -1.5, "rank": 3}}, {"6": {"logprob": -2.5, "rank": 1}}]
    reply = {**answer([7]), "prompt_logprobs": scores}
    async with engine(lambda _: httpx2.Response(200, json=reply)) as client:
        assert await client.score((4, 5, 6)) == (-1.5, -2.5)


@pytest.mark.parametrize("scores", [None, [None], [None, None], [None, {"6": {"logprob": -1.0}}]])
async def test_a_missing_score_is_refused(scores: Any) -> None:
    reply = {**answer([7]), "prompt_logprobs": scores}
    async with engine(lambda _: httpx2.Response(200, json=reply)) as client:
        with pytest.raises(EngineError, match="score"):
            await client.score((4, 5))
