"""Connections that break at every place, over a real socket: no reply is paid for twice because of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from anyio.abc import SocketStream

from clawhpc.proxy.app import open_session
from clawhpc.proxy.respond import ScriptedResponder
from clawhpc.proxy.session import Session
from clawhpc.records import Limits, Reply
from clawhpc.tree.prune import prune_tree
from tests.fakes.caller import classify, policy, user
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.sockets import http_request

pytestmark = pytest.mark.anyio
Body = dict[str, Any]
LONG = "x" * 3_000_000
"""More than the kernel holds for a reader that does not read."""


def body_of(*messages: Body, **fields: Any) -> Body:
    return {"model": "policy", "max_tokens": 100, "messages": list(messages or [user("hi")]), **fields}


@asynccontextmanager
async def serving(folder: Path, answers: FakeEngine | ScriptedResponder) -> AsyncIterator[Harness]:
    socket = folder / "p"
    async with (
        open_session(
            responder=policy(answers) if isinstance(answers, FakeEngine) else answers,
            classify=classify,
            limits=Limits(),
            seed=0,
            socket=socket,
            model="policy",
            keep_alive_s=0.05,
        ) as session,
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(socket)), timeout=20) as client,
    ):
        with anyio.fail_after(60):
            yield Harness(session, client, socket)


class Harness:
    """Asks well, or hangs up."""

    def __init__(self, session: Session, client: httpx2.AsyncClient, socket: Path) -> None:
        self.session, self._client, self._socket = session, client, socket
        self._base = f"{session.base_path}/v1"

    async def post(self, body: Body, *, path: str = "messages") -> httpx2.Response:
        return await self._client.post(f"http://proxy{self._base}/{path}", json=body)

    async def ask(self, body: Body) -> str:
        """The text of a whole answer, plain or streamed."""
        response = await self.post(body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return "".join(block["text"] for block in response.json()["content"])
        events = [msgspec.json.decode(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")

    @asynccontextmanager
    async def sending(self, body: Body, *, share: float = 1, path: str = "messages") -> AsyncIterator[SocketStream]:
        """A connection on which the first `share` of the request was sent; it is hung up after the block."""
        request = http_request(f"{self._base}/{path}", msgspec.json.encode(body))
        async with await anyio.connect_unix(self._socket) as connection:
            await connection.send(request[: int(share * len(request))])
            yield connection
        await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fallback", [False, True])
async def test_who_hangs_up_while_the_engine_draws_is_given_that_answer(
    tmp_path: Path, stream: bool, fallback: bool
) -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    async with serving(tmp_path, engine) as harness:
        async with harness.sending(body_of(stream=stream)):
            await engine.asked.wait()
        assert engine.gate is not None
        engine.gate.set()
        assert await harness.ask(body_of(stream=fallback)) == "hello"
        assert [call.delivered for call in harness.session.calls()] == [True]
        assert (len(engine.requests), engine.cancelled) == (1, [])


CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
PROTOCOLS = {
    "anthropic": ("messages", body_of(stream=True), "messages", body_of()),
    "chat": ("chat/completions", body_of(stream=True), "chat/completions", body_of(stream=False)),
    "responses": (
        "responses",
        {"model": "p", "input": "hi", "stream": True},
        "responses",
        {"model": "p", "input": "hi"},
    ),
    "gemini": ("models/p:streamGenerateContent?alt=sse", CONTENTS, "models/p:generateContent", CONTENTS),
}
"""Path and body of a stream, and of its plain fallback."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_in_each_protocol_a_silent_stream_shows_signs_of_life_and_when_cut_a_plain_request_gets_its_answer(
    tmp_path: Path, protocol: str
) -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    path, streamed, plain_path, plain = PROTOCOLS[protocol]
    async with serving(tmp_path, engine) as harness:
        async with harness.sending(streamed, path=path) as connection:
            seen = b""
            while seen.count(b"data: ") < 4:
                seen += await connection.receive()
        assert b"200 OK" in seen
        assert engine.gate is not None
        engine.gate.set()
        response = await harness.post(plain, path=plain_path)
        assert response.status_code == 200
        assert '"hello"' in response.text
        assert [call.delivered for call in harness.session.calls()] == [True]
        assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_in_its_middle_is_given_again_whole(tmp_path: Path, stream: bool) -> None:
    said: list[str] = []

    def say(conversation: object) -> Reply:
        said.append(LONG)
        return Reply(text=LONG)

    async with serving(tmp_path, ScriptedResponder(script=say)) as harness:
        async with harness.sending(body_of(stream=stream)) as connection:
            num_bytes = 0
            while num_bytes < 100_000:
                num_bytes += len(await connection.receive())
        assert [call.delivered for call in harness.session.calls()] == [False]
        assert await harness.ask(body_of(stream=stream)) == LONG
        assert [call.delivered for call in harness.session.calls()] == [True]
        assert len(said) == 1


async def test_a_request_that_breaks_off_is_no_call(tmp_path: Path) -> None:
    engine = FakeEngine(replies("hello"))
    async with serving(tmp_path, engine) as harness:
        for share in (0.1, 0.5, 0.9):
            async with harness.sending(body_of(), share=share):
                pass
        assert await harness.ask(body_of()) == "hello"
        assert len(harness.session.calls()) == len(engine.requests) == 1


async def test_a_stream_and_a_plain_request_at_once_share_one_draw(tmp_path: Path) -> None:
    engine = FakeEngine(replies("hello"), delay_s=0.2)
    async with serving(tmp_path, engine) as harness:
        heard: list[str] = []

        async def ask(stream: bool) -> None:
            heard.append(await harness.ask(body_of(stream=stream)))

        async with anyio.create_task_group() as tasks:
            for stream in (True, False, True):
                tasks.start_soon(ask, stream)
        assert heard == ["hello"] * 3
        assert len(harness.session.calls()) == len(engine.requests) == 1


async def test_a_longer_answer_on_request_is_another_call_and_the_shorter_one_a_dead_leaf(tmp_path: Path) -> None:
    """As Qwen Code does after an answer that was cut by its length."""
    engine = FakeEngine(replies("a long answer", "a long answer", "done"))
    async with serving(tmp_path, engine) as harness:
        assert await harness.ask(body_of(max_tokens=6)) == "a long"
        longer = await harness.ask(body_of(max_tokens=64))
        assert longer == "a long answer"
        echoed = body_of(user("hi"), {"role": "assistant", "content": longer}, user("go on"))
        assert await harness.ask(echoed) == "done"
        calls = harness.session.calls()
    assert [call.requested.max_tokens for call in calls] == [6, 64, 100]
    assert prune_tree("r", calls, max_live_leaves=8).dropped == {0: "dead"}


async def test_a_regeneration_on_purpose_is_drawn_and_leaves_a_dead_leaf(tmp_path: Path) -> None:
    engine = FakeEngine(replies("first", "second", "done"))
    async with serving(tmp_path, engine) as harness:
        assert await harness.ask(body_of()) == "first"
        assert await harness.ask(body_of()) == "second"
        await harness.ask(body_of(user("hi"), {"role": "assistant", "content": "second"}, user("go on")))
        calls = harness.session.calls()
    assert [call.delivered for call in calls] == [True, True, True]
    assert prune_tree("r", calls, max_live_leaves=8).dropped == {0: "dead"}


async def test_an_answer_that_was_never_fetched_stays_recorded_as_not_delivered(tmp_path: Path) -> None:
    """A harness that edits its history after a broken connection, as OpenClaw does, asks for something else."""
    engine = FakeEngine(replies("lost", "done"), gate=anyio.Event())
    async with serving(tmp_path, engine) as harness:
        async with harness.sending(body_of()):
            await engine.asked.wait()
        assert engine.gate is not None
        engine.gate.set()
        assert await harness.ask(body_of(user("hi"), user("Continue the current task."))) == "done"
        calls = harness.session.calls()
    assert [call.delivered for call in calls] == [False, True]
