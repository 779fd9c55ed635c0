"""The proxy over a real unix socket, with a plain HTTP client."""

from __future__ import annotations

import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from anyio.abc import ByteReceiveStream

from clawhpc.errors import EngineError, ProxyError
from clawhpc.proxy.app import open_session
from clawhpc.proxy.respond import PolicySampling, Responder, ScriptedResponder
from clawhpc.proxy.session import ALWAYS_READ_BYTES, Session
from clawhpc.records import Limits, Reply
from tests.fakes.caller import ROOMY, classify, policy, user
from tests.fakes.engine import FakeEngine, replies

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(
    answers: FakeEngine | Responder,
    folder: Path,
    *,
    sampling: PolicySampling = ROOMY,
    strict: bool = False,
) -> AsyncIterator[tuple[Session, httpx2.AsyncClient]]:
    """A session and a client whose base URL is the session's."""
    socket = folder / "p.sock"
    async with (
        open_session(
            responder=policy(answers, sampling) if isinstance(answers, FakeEngine) else answers,
            classify=classify,
            limits=Limits(),
            seed=0,
            socket=socket,
            model="policy-7",
            keep_alive_s=0.05,
            strict=strict,
        ) as session,
        client_of(session, socket) as client,
    ):
        yield session, client


def client_of(session: Session, socket: Path) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(uds=str(socket))
    return httpx2.AsyncClient(transport=transport, base_url=f"http://proxy{session.base_path}", timeout=5)


def anthropic_body(words: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 100, "messages": [user(words)], **fields}


def event_names(stream: str) -> list[str]:
    return re.findall(r"^event: (.*)$", stream, flags=re.MULTILINE)


async def test_a_stream_opens_at_once_keeps_alive_and_then_has_the_whole_turn(tmp_path: Path) -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    async with serving(engine, tmp_path) as (session, client):
        async with client.stream("POST", "/v1/messages?beta=true", json=anthropic_body(stream=True)) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            seen = ""
            async for piece in response.aiter_text():
                seen += piece
                if event_names(seen).count("ping") == 2 and engine.gate is not None:
                    engine.gate.set()
        assert [name for name in event_names(seen) if name != "ping"] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert f'"input_tokens":{len(engine.requests[0].prompt_ids)}' in seen
        assert session.calls()[0].delivered


async def test_a_stream_that_is_cut_gets_its_answer_on_the_next_try_even_as_a_plain_body(tmp_path: Path) -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    async with serving(engine, tmp_path) as (session, client):
        async with client.stream("POST", "/v1/messages", json=anthropic_body(stream=True)) as response:
            await anext(response.aiter_raw())
        assert engine.gate is not None
        engine.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert [call.delivered for call in session.calls()] == [False]
        assert engine.cancelled == []
        retry = await client.post("/v1/messages", json=anthropic_body())
        assert retry.json()["content"] == [{"type": "text", "text": "hello"}]
        assert [call.delivered for call in session.calls()] == [True]
        assert len(engine.requests) == 1


async def test_a_plain_request_whose_client_hangs_up_is_not_delivered(tmp_path: Path) -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    async with serving(engine, tmp_path) as (session, client):
        with anyio.move_on_after(0.1):
            await client.post("/v1/messages", json=anthropic_body())
        assert engine.gate is not None
        engine.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert [call.delivered for call in session.calls()] == [False]


async def test_a_retry_beside_the_first_request_shares_its_draw(tmp_path: Path) -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    async with serving(engine, tmp_path) as (session, client):
        bodies: list[Any] = []

        async def post() -> None:
            bodies.append((await client.post("/v1/messages", json=anthropic_body())).json())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            tasks.start_soon(post)
            await engine.asked.wait()
            await anyio.wait_all_tasks_blocked()
            assert engine.gate is not None
            engine.gate.set()
        assert bodies[0] == bodies[1]
        assert len(session.calls()) == 1


async def test_an_engine_failure_is_an_overload_in_the_protocols_words(tmp_path: Path) -> None:
    engine = FakeEngine(lambda prompt: EngineError("gone"))
    async with serving(engine, tmp_path) as (session, client):
        streamed = await client.post("/v1/messages", json=anthropic_body(stream=True))
        assert event_names(streamed.text)[-1] == "error"
        assert "overloaded_error" in streamed.text
        plain = await client.post("/v1/messages", json=anthropic_body())
        assert (plain.status_code, plain.json()["error"]["type"]) == (529, "overloaded_error")
        chat = await client.post("/v1/chat/completions", json=anthropic_body())
        assert (chat.status_code, chat.json()["error"]["code"]) == (503, "overloaded")
        assert isinstance(session.failure, EngineError)


async def test_an_overflow_is_an_http_error_also_for_a_stream(tmp_path: Path) -> None:
    small = PolicySampling(context_window=20)
    async with serving(FakeEngine(replies()), tmp_path, sampling=small) as (_, client):
        response = await client.post("/v1/messages", json=anthropic_body("x" * 50, stream=True))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "prompt is too long: 69 tokens > 20 maximum"
        chat = await client.post("/v1/chat/completions", json=anthropic_body("x" * 50, stream=True))
        assert chat.json()["error"]["code"] == "context_length_exceeded"


async def test_a_body_too_long_for_the_window_is_an_overflow_in_the_protocols_words(tmp_path: Path) -> None:
    small = PolicySampling(context_window=20)
    async with serving(FakeEngine(replies()), tmp_path, sampling=small) as (session, client):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = await client.post(path, content=b"[" * (3 * ALWAYS_READ_BYTES))
            assert response.status_code == 400
            assert "prompt is too long: 49152 tokens > 20 maximum" in response.json()["error"]["message"]
        chat = await client.post("/v1/chat/completions", content=b"[" * (3 * ALWAYS_READ_BYTES))
        assert chat.json()["error"]["code"] == "context_length_exceeded"
        assert (session.limit, session.calls(), session.failure) == ("context", (), None)


async def test_the_small_endpoints_answer(tmp_path: Path) -> None:
    engine = FakeEngine(replies("a"))
    async with serving(engine, tmp_path) as (session, client):
        assert (await client.head("")).status_code == 200
        assert (await client.head("/")).status_code == 200
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["policy-7"]
        counted = (await client.post("/v1/messages/count_tokens", json=anthropic_body())).json()
        await client.post("/v1/messages", json=anthropic_body())
        assert counted == {"input_tokens": len(engine.requests[0].prompt_ids)}
        assert len(session.calls()) == 1


async def test_models_are_listed_in_the_form_of_who_asks(tmp_path: Path) -> None:
    async with serving(FakeEngine(replies()), tmp_path) as (_, client):
        assert (await client.get("/v1/models")).json()["object"] == "list"
        assert (await client.get("/v1/models/some/name")).json()["id"] == "some/name"
        asking = {"anthropic-version": "2023-06-01"}
        assert (await client.get("/v1/models", headers=asking)).json()["first_id"] == "policy-7"
        assert (await client.get("/v1/models/x", headers=asking)).json()["type"] == "model"
        assert (await client.get("/api/v1/models")).status_code == 404


def responses_body(words: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "input": [user(words)], **fields}


async def test_a_response_streams_with_its_own_keep_alives(tmp_path: Path) -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    async with serving(engine, tmp_path) as (session, client):
        async with client.stream("POST", "/v1/responses", json=responses_body(stream=True)) as response:
            seen = ""
            async for piece in response.aiter_text():
                seen += piece
                if event_names(seen).count("response.in_progress") == 3 and engine.gate is not None:
                    engine.gate.set()
        assert [name for name in event_names(seen) if name != "response.in_progress"] == [
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert session.calls()[0].protocol == "openai_responses"


async def test_an_overflow_is_told_in_a_stream_of_responses(tmp_path: Path) -> None:
    small = PolicySampling(context_window=20)
    async with serving(FakeEngine(replies()), tmp_path, sampling=small) as (_, client):
        plain = await client.post("/v1/responses", json=responses_body("x" * 50))
        assert (plain.status_code, plain.json()["error"]["code"]) == (400, "context_length_exceeded")
        streamed = await client.post("/v1/responses", json=responses_body("y" * 50, stream=True))
        assert event_names(streamed.text)[-1] == "response.failed"
        assert '"code":"context_length_exceeded"' in streamed.text
        accepting = {"accept": "text/event-stream"}
        unread = await client.post("/v1/responses", content=b"[" * (3 * ALWAYS_READ_BYTES), headers=accepting)
        assert event_names(unread.text)[-1] == "response.failed"


async def test_what_was_not_obeyed_is_recorded_and_an_unlisted_field_is_refused_only_under_strict(
    tmp_path: Path,
) -> None:
    odd = {"temperature": 0, "new_in_2027": 1}
    paths = {"/v1/messages": anthropic_body(**odd), "/v1/chat/completions": anthropic_body(**odd)}
    paths["/v1/responses"] = responses_body(**odd)
    async with serving(FakeEngine(lambda prompt: "a"), tmp_path) as (session, client):
        for path, body in paths.items():
            assert (await client.post(path, json=body)).status_code == 200
        assert [call.unlisted for call in session.calls()] == [("new_in_2027",)] * 3
        assert [call.overridden for call in session.calls()] == [("temperature",)] * 3
        await client.post("/v1/messages", json=anthropic_body(temperature=ROOMY.temperature))
        assert session.calls()[-1].overridden == (), "it gets what it asks for"
    for path, body in paths.items():
        async with serving(FakeEngine(lambda prompt: "a"), tmp_path, strict=True) as (session, client):
            assert (await client.post(path, json={**body, "new_in_2027": None, "temperature": 1})).status_code == 400
            assert isinstance(session.failure, ProxyError), "what the harness then does is not the policy's doing"
            assert "new_in_2027" in str(session.failure)
            await session.wait_stopped()
        async with serving(FakeEngine(lambda prompt: "a"), tmp_path, strict=True) as (session, client):
            known = {name: value for name, value in body.items() if name != "new_in_2027"}
            assert (await client.post(path, json=known)).status_code == 200
            assert session.failure is None


async def test_nobody_gets_in_without_the_token_or_after_the_end(tmp_path: Path) -> None:
    async with serving(FakeEngine(replies("a")), tmp_path) as (session, client):
        wrong = session.base_path[:-1] + ("a" if session.base_path[-1] != "a" else "b")
        for path in ("/v1/messages", "/s/v1/messages", f"{wrong}/v1/messages", "/"):
            response = await client.post(f"http://proxy{path}", json=anthropic_body())
            assert response.status_code == 404, path
        await session.settle(0.0)
        response = await client.post("/v1/messages", json=anthropic_body())
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        for path in ("", "/", "/v1/models", "/v1/models/m", "/v1beta/models", "/v1beta/models/m"):
            assert (await client.get(f"http://proxy{session.base_path}{path}")).status_code == 404, path
        assert session.calls() == ()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\u80"}]}', 400),
        (b"[" * 5000, 400),
        (b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image"}]}]}', 400),
        (b" " * 20_000, 413),
    ],
)
async def test_bad_bodies_are_refused_without_a_call(
    tmp_path: Path, content: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawhpc.proxy.app.MAX_BODY_BYTES", 10_000)
    async with serving(FakeEngine(replies()), tmp_path) as (session, client):
        for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
            response = await client.post(path, content=content)
            assert response.status_code == status
            assert response.json()["error"]["message"]
        assert session.calls() == ()
        assert session.failure is None


async def test_several_sessions_share_one_event_loop(tmp_path: Path) -> None:
    engine = FakeEngine(lambda prompt: "ok")
    for folder in ("0", "1"):
        (tmp_path / folder).mkdir()
    async with (
        serving(engine, tmp_path / "0") as (one, client),
        serving(engine, tmp_path / "1") as (two, other),
    ):
        await client.post("/v1/messages", json=anthropic_body("one"))
        await other.post("/v1/messages", json=anthropic_body("two"))
        assert [call.new_messages[0].text for call in (*one.calls(), *two.calls())] == ["one", "two"]
        assert one.base_path != two.base_path


async def test_the_end_of_a_session_hangs_up_and_removes_its_socket(tmp_path: Path) -> None:
    engine = FakeEngine(replies("a"), gate=anyio.Event())
    statuses: list[int] = []
    async with serving(engine, tmp_path) as (session, client):

        async def post() -> None:
            statuses.append((await client.post("/v1/messages", json=anthropic_body())).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await engine.asked.wait()
            await session.settle(0.0)
    assert statuses == [529]
    assert not (tmp_path / "p.sock").exists()


async def test_a_failure_of_the_block_cancels_calls_and_passes_as_it_is(tmp_path: Path) -> None:
    engine = FakeEngine(replies("a"), gate=anyio.Event())
    sessions: list[Session] = []

    async def fail_in_mid_call() -> None:
        async with serving(engine, tmp_path) as (session, client):
            sessions.append(session)
            with anyio.move_on_after(0.1):
                await client.post("/v1/messages", json=anthropic_body())
            raise EngineError("mine")

    with pytest.raises(EngineError, match="mine"):
        await fail_in_mid_call()
    assert len(engine.cancelled) == 1
    assert [call.failure for call in sessions[0].calls()] == ["cancelled"]


async def test_a_harness_that_stops_reading_does_not_hold_the_session_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawhpc.proxy.app.SHUTDOWN_S", 0.5)
    endless = ScriptedResponder(script=lambda conversation: Reply(text="x" * 5_000_000))
    async with serving(endless, tmp_path) as (session, client):
        stream = await anyio.connect_unix(tmp_path / "p.sock")
        request = client.build_request("POST", "/v1/messages", json=anthropic_body())
        lines = [f"POST {request.url.path} HTTP/1.1", "host: proxy", f"content-length: {len(request.content)}", "", ""]
        await stream.send("\r\n".join(lines).encode() + request.content)
        await stream.receive()
    assert session.calls()[0].reply is not None
    assert not session.calls()[0].delivered
    with anyio.fail_after(5):
        assert await read_to_the_end(stream) < 5_000_000
    await stream.aclose()


async def read_to_the_end(stream: ByteReceiveStream) -> int:
    """How many bytes came."""
    num_bytes = 0
    try:
        while True:
            num_bytes += len(await stream.receive())
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return num_bytes


async def test_only_this_user_may_open_the_socket(tmp_path: Path) -> None:
    async with serving(FakeEngine(replies()), tmp_path):
        assert stat.S_IMODE((tmp_path / "p.sock").stat().st_mode) == 0o600


async def test_a_socket_that_cannot_be_made_is_a_failure_of_the_proxy(tmp_path: Path) -> None:
    with pytest.raises(ProxyError, match="cannot listen on"):
        async with serving(FakeEngine(replies()), tmp_path / "missing"):
            pass
