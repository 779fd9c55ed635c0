"""What only Gemini's paths have: the model and the method stand in the URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from clawhpc.proxy.app import open_session
from clawhpc.records import Limits
from tests.fakes.caller import classify, policy
from tests.fakes.engine import FakeEngine, replies

pytestmark = pytest.mark.anyio

HI = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


async def answers(folder: Path, *requests: tuple[str, str, Any]) -> list[httpx2.Response]:
    """To (method, path, body) one after the other, in one session."""
    socket = folder / "p.sock"
    async with (
        open_session(
            responder=policy(FakeEngine(replies("one", "two"))),
            classify=classify,
            limits=Limits(),
            seed=0,
            socket=socket,
            model="policy",
        ) as session,
        httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=str(socket)), base_url=f"http://proxy{session.base_path}"
        ) as http,
    ):
        return [await http.request(method, path, json=body) for method, path, body in requests]


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_the_method_says_whether_to_stream(tmp_path: Path, version: str) -> None:
    at = f"/{version}/models/some-model"
    plain, streamed = await answers(
        tmp_path, ("POST", f"{at}:generateContent", HI), ("POST", f"{at}:streamGenerateContent?alt=sse", HI)
    )
    assert plain.json()["candidates"][0]["content"]["parts"] == [{"text": "one"}]
    assert plain.json()["modelVersion"] == "some-model"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    opening, turn = [json.loads(event.removeprefix("data: ")) for event in streamed.text.strip().split("\n\n")]
    assert "finishReason" not in opening["candidates"][0]
    assert turn["candidates"][0]["content"]["parts"] == [{"text": "two"}]


async def test_a_stream_that_is_no_stream_of_events_is_refused_by_name(tmp_path: Path) -> None:
    (answer,) = await answers(tmp_path, ("POST", "/v1beta/models/m:streamGenerateContent", HI))
    assert answer.status_code == 400
    assert "alt=sse" in answer.json()["error"]["message"]


async def test_tokens_are_counted_bare_and_wrapped(tmp_path: Path) -> None:
    path = "/v1beta/models/m:countTokens"
    bare, wrapped, none = await answers(
        tmp_path, ("POST", path, HI), ("POST", path, {"generateContentRequest": HI}), ("POST", path, {"contents": []})
    )
    assert bare.json()["totalTokens"] == wrapped.json()["totalTokens"] > 0
    assert (none.status_code, none.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")


async def test_models_are_listed_and_what_no_harness_asks_for_is_not_answered(tmp_path: Path) -> None:
    listed, one, unknown = await answers(
        tmp_path,
        ("GET", "/v1beta/models", None),
        ("GET", "/v1beta/models/policy", None),
        ("POST", "/v1beta/models/policy:embedContent", HI),
    )
    assert listed.json()["models"] == [one.json()]
    assert one.json()["name"] == "models/policy"
    assert unknown.status_code == 405
