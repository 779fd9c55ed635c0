"""A judge behind a scripted endpoint: what it says is the score; whatever else happens is a failure, never a 0."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from clawhpc.errors import VerifierError
from clawhpc.records import Judgement, Usage
from clawhpc.verify.prompt import prompt_digest
from tests.fakes.judge_endpoint import (
    FAST,
    GOOD,
    RUBRIC,
    Answer,
    Request,
    asking,
    completion,
    failure,
    judged,
    scores,
    verdict,
)

pytestmark = pytest.mark.anyio


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
