"""A rollout whose calls a model behind an API answers, or refuses."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from clawhpc.proxy.endpoint import Endpoint, EndpointResponder
from clawhpc.proxy.settings import EndpointSettings
from clawhpc.records import Outcome
from clawhpc.rollout.run import run_rollout
from tests.fakes.rollout import FakeSandbox, one_call, parts_of, plan_of
from tests.fakes.upstream import MODEL, Upstream

pytestmark = pytest.mark.anyio
SETTINGS = EndpointSettings(base_url="http://endpoint/v1", model="large", max_retries=0)


@pytest.mark.parametrize(
    ("failure", "outcome", "words"),
    [
        (httpx2.Response(401, json={"error": {"message": "no such key"}}), Outcome.ENGINE_FAILED, "401 no such key"),
        (httpx2.Response(500), Outcome.ENGINE_FAILED, "asked 1 times in vain"),
        (None, Outcome.COMPLETED, ""),
    ],
)
async def test_what_an_endpoint_refuses_in_mid_rollout_is_a_failure_of_the_machine(
    tmp_path: Path, failure: httpx2.Response | None, outcome: Outcome, words: str
) -> None:
    upstream = Upstream(failures=[failure] if failure else [])
    async with Endpoint(SETTINGS, None, window=8000, transport=httpx2.MockTransport(upstream)) as endpoint:
        responder = EndpointResponder(endpoint=endpoint, max_tokens=10, temperature=1.0)
        record = await run_rollout(plan_of(), parts_of(tmp_path, FakeSandbox(one_call), responder=responder))
    assert record.outcome is outcome
    assert words in record.detail
    assert [call.model for call in record.calls] == [MODEL if failure is None else ""]
