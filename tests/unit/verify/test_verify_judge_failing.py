"""Endpoints of a judge that fail, hang or hold less than they are sent: asked again, or a failure, never a 0."""

from __future__ import annotations

from dataclasses import replace

import anyio
import msgspec
import pytest

from clawhpc.errors import VerifierError
from clawhpc.records import Judgement
from clawhpc.verify.judge import open_judge
from clawhpc.verify.settings import JudgeModel
from clawhpc.verify.show import escaped
from tests.fakes.judge_endpoint import (
    CASE,
    FAST,
    GOOD,
    Answer,
    Request,
    Says,
    asking,
    completion,
    failure,
    judge_endpoint,
    judged,
)

pytestmark = pytest.mark.anyio


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
