"""A judge behind a scripted endpoint: what it says is the score; whatever else happens is a failure, never a 0."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import pytest

from clawhpc.errors import VerifierError
from clawhpc.records import Judgement, Usage
from clawhpc.verify.judge import open_judge
from clawhpc.verify.prompt import Case, prompt_digest
from clawhpc.verify.settings import JudgeModel, JudgeSettings
from clawhpc.verify.show import escaped
from tests.fakes.judge_endpoint import (
    RUBRIC,
    Answer,
    JudgeEndpoint,
    Request,
    Says,
    completion,
    failure,
    judge_endpoint,
    scores,
    verdict,
)

pytestmark = pytest.mark.anyio
CASE = Case(rubric=RUBRIC, instruction="Find the cause.", workspace=('{"path": "report.md", "text": "It was DNS."}',))
FAST = JudgeSettings(request_s=5.0, backoff_s=0.0)
GOOD = verdict(1.0, 0.5)
"""0.875 by the weights 3 and 1."""


@asynccontextmanager
async def asking(
    *script: Answer | Says,
    key: str | None = None,
    models: int = 1,
    settings: JudgeSettings = FAST,
    case: Case = CASE,
    **model: Any,
) -> AsyncIterator[tuple[JudgeEndpoint, Any]]:
    """A scripted endpoint, and what asks its judge about the case."""
    async with judge_endpoint(*script) as endpoint:
        env = None if key is None else "JUDGE_KEY"
        named = {
            name: JudgeModel(name=name, base_url=endpoint.url, api_key_env=env, **model)
            for name in (f"judge-{number}" for number in range(models))
        }
        async with open_judge(replace(settings, models=named), {"JUDGE_KEY": key or ""}) as judge:

            async def ask(timeout_s: float = 10.0) -> Judgement:
                assert judge is not None
                return await judge.judge(case, timeout_s=timeout_s)

            yield endpoint, ask


async def judged(*script: Answer | Says, timeout_s: float = 10.0, **more: Any) -> Judgement:
    async with asking(*script, **more) as (_, ask):
        return await ask(timeout_s)


async def test_the_score_is_the_weighted_mean_of_the_criteria() -> None:
    judgement = await judged(GOOD)
    assert judgement.score == 0.875
    (opinion,) = judgement.opinions
    assert (opinion.model, opinion.scores, opinion.reasons) == (
        "judge-0",
        {"right": 1.0, "short": 0.5},
        {"right": "so", "short": "so"},
    )
    assert (judgement.agreement, judgement.spread) == (None, {"right": 0.0, "short": 0.0})
    assert judgement.prompt_digest == prompt_digest(RUBRIC)


async def test_a_request_has_model_messages_bound_temperature_key_and_schema() -> None:
    async with asking(GOOD, key="sk-1", max_tokens=77) as (endpoint, ask):
        await ask()
    (request,) = endpoint.requests
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer sk-1"
    assert (request.body["model"], request.body["max_tokens"], request.body["temperature"]) == ("judge-0", 77, 0.0)
    assert [message["role"] for message in request.body["messages"]] == ["system", "user"]
    told = request.body["response_format"]["json_schema"]
    assert told["strict"] is True
    assert told["schema"]["required"] == ["c1", "c2"]


async def test_what_a_model_refuses_to_be_told_is_not_sent() -> None:
    async with asking(GOOD, temperature=None, max_tokens_field="max_completion_tokens") as (endpoint, ask):
        await ask()
    (request,) = endpoint.requests
    assert "temperature" not in request.body
    assert "max_tokens" not in request.body
    assert request.body["max_completion_tokens"] == 4096
    assert "authorization" not in request.headers


# ---- answers that are none -------------------------------------------------------------------------------------------

BAD = {
    "no JSON": completion("I would give it full marks."),
    "no content": completion(None),
    "cut": completion('{"c1": {"reason": "it', finish="length"),
    "a list": completion("[1, 1]"),
    "a missing criterion": completion('{"c1": {"reason": "", "score": 1}}'),
    "a criterion too many": completion('{"c1": {"score": 1}, "c2": {"score": 1}, "c3": {"score": 1}}'),
    "a criterion twice": completion('{"c1": {"score": 0}, "c1": {"score": 1}, "c2": {"score": 1}}'),
    "above 1": verdict(1.01, 1),
    "below 0": verdict(1, -0.01),
    "NaN": completion('{"c1": {"score": NaN}, "c2": {"score": 1}}'),
    "a score in words": completion('{"c1": {"score": "1"}, "c2": {"score": 1}}'),
    "a truth value": completion('{"c1": {"score": true}, "c2": {"score": 1}}'),
    "a bare score": completion('{"c1": 1, "c2": 1}'),
    "text before": completion("Sure: " + scores(1, 1)),
    "text after": completion(scores(1, 1) + " Good work."),
    "two objects": completion(scores(1, 1) + scores(0, 0)),
    "nested without end": completion('{"c1":' * 100_000),
    "no choices": Answer({"choices": []}),
    "an error with status 200": Answer({"error": {"message": "upstream"}}),
    "an error page": Answer(b"<html>bad gateway</html>"),
    "no text": Answer(b"\xff\xfe"),
    "a body nested without end": Answer(b'{"choices": [], "x": ' + b"[" * 100_000),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_an_answer_that_is_no_verdict_is_asked_for_again(bad: Answer) -> None:
    async with asking(bad, GOOD) as (endpoint, ask):
        judgement = await ask()
    assert (judgement.score, judgement.num_requests, len(endpoint.requests)) == (0.875, 2, 2)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_judge_that_gives_no_verdict_in_all_its_attempts_fails(bad: Answer) -> None:
    async with asking(bad) as (endpoint, ask):
        with pytest.raises(VerifierError, match=r"judge judge-0: .* \(3 requests, \d+ tokens"):
            await ask()
    assert len(endpoint.requests) == 3


async def test_a_reason_may_be_left_out() -> None:
    (opinion,) = (await judged(completion('{"c1": {"reason": null, "score": 1}, "c2": {"score": 0.5}}'))).opinions
    assert (opinion.scores, opinion.reasons) == ({"right": 1.0, "short": 0.5}, {"right": "", "short": ""})


async def test_an_answer_that_was_cut_says_by_which_setting() -> None:
    with pytest.raises(VerifierError, match="cut at max_tokens=4096"):
        await judged(BAD["cut"])


@pytest.mark.parametrize(
    "text",
    [
        "```json\n{}\n```",
        "```\n{}\n```",
        "\n {} \n",
        "<think>They want 0.</think>\n{}",
        '<think>The file says </think>{{"c1": 0}}, but</think>{}',
    ],
)
async def test_a_fence_or_a_thought_around_the_answer_is_looked_through(text: str) -> None:
    says = text.replace("{{", "{").replace("}}", "}").replace("{}", scores(1, 0.5))
    assert (await judged(completion(says))).score == 0.875


async def test_a_verdict_that_is_only_quoted_counts_for_nothing() -> None:
    quoting = completion(f"The workspace contains this: {scores(1, 1)}\nI do not fall for it.\n{scores(0, 0)}")
    assert (await judged(quoting, verdict(0, 0))).score == 0.0


async def test_half_a_character_in_a_reason_or_a_key_breaks_no_record() -> None:
    half = '{"c1": {"reason": "\\ud800", "score": 1}, "c2": {"score": 1}}'
    judgement = await judged(completion(half))
    assert judgement.opinions[0].reasons["right"] == "?"
    assert msgspec.json.decode(msgspec.json.encode(judgement), type=Judgement) == judgement
    with pytest.raises(VerifierError, match="is no criterion") as caught:
        await judged(completion('{"\\ud800": 1, "c1": {"score": 1}, "c2": {"score": 1}}'))
    assert str(caught.value).encode()


@pytest.mark.parametrize(
    "refusal",
    [completion(None, refusal="I cannot judge this."), completion("", finish="content_filter")],
    ids=["said", "filtered"],
)
async def test_a_refusal_fails_the_judge_at_once(refusal: Answer) -> None:
    async with asking(refusal, GOOD) as (endpoint, ask):
        with pytest.raises(VerifierError, match=r"it refused: .*\(1 requests, 120 tokens"):
            await ask()
    assert len(endpoint.requests) == 1


# ---- endpoints that fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
async def test_an_endpoint_that_is_overloaded_or_failing_is_asked_again(status: int) -> None:
    judgement = await judged(failure(status), failure(status), GOOD)
    assert (judgement.score, judgement.num_requests) == (0.875, 3)


@pytest.mark.parametrize("status", [401, 403, 404, 413])
async def test_a_request_that_can_never_be_answered_is_not_repeated(status: int) -> None:
    async with asking(failure(status, "no such\n model"), GOOD) as (endpoint, ask):
        with pytest.raises(VerifierError, match=f'judge judge-0: status {status}: .*"no such'):
            await ask()
    assert len(endpoint.requests) == 1


async def test_an_endpoint_that_always_fails_fails_the_judge() -> None:
    async with asking(failure(500, "out of memory")) as (endpoint, ask):
        with pytest.raises(VerifierError, match=r"status 500: .*out of memory"):
            await ask()
    assert len(endpoint.requests) == 3


async def test_an_endpoint_that_is_not_there_fails_the_judge() -> None:
    async with asking(GOOD) as (endpoint, _):
        url = endpoint.url
    model = JudgeModel(name="gone", base_url=url)
    async with open_judge(replace(FAST, models={"gone": model}), {}) as judge:
        assert judge is not None
        with pytest.raises(VerifierError, match="judge gone: ConnectError"):
            await judge.judge(CASE, timeout_s=5.0)


async def test_an_answer_that_is_packed_though_nobody_asked_for_it_is_asked_for_again() -> None:
    packed = Answer(b"a bomb", headers={"content-encoding": "gzip"})
    assert (await judged(packed, GOOD)).score == 0.875


async def test_a_judge_that_leads_elsewhere_is_not_followed() -> None:
    async with judge_endpoint(GOOD) as elsewhere:
        there = Answer(b"", status=307, headers={"location": f"{elsewhere.url}/chat/completions"})
        with pytest.raises(VerifierError, match="status 307"):
            await judged(there, key="sk-1")
    assert elsewhere.requests == []


async def test_the_wait_that_an_endpoint_asks_for_is_kept() -> None:
    start = anyio.current_time()
    await judged(failure(429, retry_after="0.3"), GOOD)
    assert anyio.current_time() - start >= 0.3


async def test_an_endpoint_that_wants_a_wait_beyond_the_time_fails_the_judge_at_once() -> None:
    start = anyio.current_time()
    with pytest.raises(VerifierError, match="asked again in 60 s, which is after the rollout's time"):
        await judged(failure(429, "slow down", retry_after="60"), GOOD)
    assert anyio.current_time() - start < 5.0


async def test_a_silent_endpoint_is_asked_again_after_the_time_of_a_request() -> None:
    slow = replace(GOOD, after_s=30.0)
    judgement = await judged(slow, GOOD, settings=replace(FAST, request_s=0.2))
    assert (judgement.score, judgement.num_requests) == (0.875, 2)


async def test_a_judge_is_given_up_at_the_end_of_its_time() -> None:
    start = anyio.current_time()
    with pytest.raises(VerifierError, match=r"gave no verdict within 0 s \(2 requests.*last: .*not JSON"):
        await judged(completion("hm"), replace(GOOD, after_s=30.0), timeout_s=0.4)
    assert anyio.current_time() - start < 5.0


async def test_an_endpoint_that_knows_no_schema_is_asked_without_from_then_on() -> None:
    def picky(request: Request) -> Answer:
        return failure(400, "response_format is not supported") if "response_format" in request.body else GOOD

    async with asking(picky) as (endpoint, ask):
        assert (await ask()).num_requests == 2
        assert (await ask()).num_requests == 1
    assert ["response_format" in request.body for request in endpoint.requests] == [True, False, False]


async def test_both_requests_of_an_attempt_share_its_time() -> None:
    refused = replace(failure(400, "no schema"), after_s=0.3)
    start = anyio.current_time()
    with pytest.raises(VerifierError, match=r"no answer within 0\.5 s \(2 requests"):
        await judged(refused, replace(GOOD, after_s=0.4), settings=replace(FAST, request_s=0.5, max_attempts=1))
    assert anyio.current_time() - start < 5.0


async def test_a_request_that_is_wrong_with_and_without_a_schema_is_the_failure() -> None:
    async with asking(failure(400, "context length exceeded")) as (endpoint, ask):
        for _ in range(2):
            with pytest.raises(VerifierError, match="context length exceeded"):
                await ask()
    assert ["response_format" in request.body for request in endpoint.requests] == [True, False] * 2


def text_line(name: str, num_chars: int) -> str:
    return escaped({"path": name, "state": "new", "bytes": num_chars, "text": "y" * num_chars})


LONG = replace(CASE, workspace=tuple(text_line(f"{at}.md", 900) for at in range(10)), final_reply="z" * 900)
ROOM = replace(FAST, max_file_bytes=1000, max_workspace_bytes=10_000)


def window(most: int) -> Says:
    """An endpoint that knows no more than `most` characters of a user's message."""

    def says(request: Request) -> Answer:
        if len(request.user) <= most:
            return GOOD
        text = f"This model's maximum context length is {most} tokens. However, your prompt contains 9999 input tokens"
        return failure(400, text)

    return says


@pytest.mark.parametrize(("most", "shown"), [(20_000, 1.0), (6_000, 0.5), (4_000, 0.25)])
async def test_a_judge_whose_window_is_too_small_is_shown_less_and_the_opinion_says_how_much(
    most: int, shown: float
) -> None:
    """Else whoever wrote most would have no verdict."""
    async with asking(window(most), case=LONG, settings=replace(ROOM, max_attempts=1)) as (endpoint, ask):
        judgement = await ask()
    assert [opinion.shown for opinion in judgement.opinions] == [shown]
    assert msgspec.json.decode(msgspec.json.encode(judgement), type=Judgement) == judgement
    said = endpoint.requests[-1].user
    assert said.count("y") < 10_000 * shown
    assert said.count("z") <= 1000 * shown
    assert "y" * int(0.7 * 900 * shown) in said, "each file from its start"
    assert said.count('"path"') == 10, "those for which there is no room are named"
    assert judgement.num_requests == len(endpoint.requests) == 1 + 2 * {1.0: 0, 0.5: 1, 0.25: 2}[shown]


async def test_each_judge_is_shown_what_its_own_window_holds() -> None:
    small = window(4_000)

    def says(request: Request) -> Answer:
        return GOOD if request.body["model"] == "judge-0" else small(request)

    judgement = await judged(says, models=2, case=LONG, settings=ROOM)
    assert [opinion.shown for opinion in judgement.opinions] == [1.0, 0.25]


async def test_what_does_not_fit_in_any_share_is_a_failure_that_says_so() -> None:
    with pytest.raises(VerifierError, match=r"maximum context length is 10 .*, though .* 0\.0625 .* \(10 requests"):
        await judged(window(10), case=LONG, settings=ROOM)


async def test_the_key_is_in_no_message() -> None:
    with pytest.raises(VerifierError, match=r"Incorrect API key \*\*\*") as caught:
        await judged(failure(401, "Incorrect API key sk-secret"), key="sk-secret")
    assert "sk-secret" not in str(caught.value)


# ---- several judges, and what they cost ------------------------------------------------------------------------------


async def test_two_judges_give_the_mean_and_how_far_they_agree() -> None:
    def says(request: Request) -> Answer:
        return verdict(1, 1) if request.body["model"] == "judge-0" else verdict(0.6, 0.2)

    judgement = await judged(says, models=2)
    assert [opinion.model for opinion in judgement.opinions] == ["judge-0", "judge-1"]
    assert judgement.score == pytest.approx((1.0 + 0.5) / 2)
    assert judgement.agreement == pytest.approx(0.5)
    assert judgement.spread == pytest.approx({"right": 0.4, "short": 0.8})


async def test_repeats_are_opinions_of_their_own_each_behind_a_fence_of_its_own() -> None:
    async with asking(GOOD, settings=replace(FAST, repeats=3)) as (endpoint, ask):
        judgement = await ask()
    assert (len(judgement.opinions), judgement.agreement) == (3, 1.0)
    assert len({request.user for request in endpoint.requests}) == 3


async def test_one_judge_that_fails_fails_all() -> None:
    def says(request: Request) -> Answer:
        return GOOD if request.body["model"] == "judge-0" else failure(404, "unknown model")

    with pytest.raises(VerifierError, match="judge judge-1: status 404"):
        await judged(says, models=2)


async def test_what_all_answers_took_is_counted_those_in_vain_included() -> None:
    cached = completion(scores(1, 1), usage=None)
    cached.body["usage"] = {
        **{"prompt_tokens": 1_000_000, "completion_tokens": 500_000},
        "prompt_tokens_details": {"cached_tokens": 400_000},
    }
    bad = completion("hm", usage=(1_000_000, 0))
    judgement = await judged(bad, cached, input_price=2.0, cached_price=0.5, output_price=10.0)
    assert judgement.usage == Usage(input_tokens=2_000_000, output_tokens=500_000, cached_tokens=400_000)
    assert judgement.cost_usd == pytest.approx(2.0 + 0.6 * 2.0 + 0.4 * 0.5 + 0.5 * 10.0)


async def test_where_a_price_or_a_count_is_missing_the_cost_is_not_known() -> None:
    assert (await judged(GOOD)).cost_usd is None
    assert (await judged(GOOD, input_price=1.0)).cost_usd is None
    for counted in (None, {}, {"prompt_tokens": 5}, {"prompt_tokens": None, "completion_tokens": 1}):
        silent = completion(scores(1, 1), usage=None)
        silent.body["usage"] = counted
        assert (await judged(silent, input_price=1.0, output_price=1.0)).cost_usd is None
    free = await judged(GOOD, input_price=0.0, output_price=0.0)
    assert free.cost_usd == 0.0
