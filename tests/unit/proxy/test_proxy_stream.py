from __future__ import annotations

import asyncio

import anyio
import pytest
from starlette.types import Message

from clawhpc.proxy.record import OpenCall
from clawhpc.proxy.stream import Answer
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ReplyHead
from tests.fakes.caller import open_call, policy, session_of, user
from tests.fakes.engine import FakeEngine, replies

pytestmark = pytest.mark.anyio


class Connection:
    """An ASGI server's side of one connection."""

    def __init__(self, *, lost_after: int | None = None) -> None:
        self.sent: list[Message] = []
        self.lost = anyio.Event()
        self.lost_after = lost_after
        """The message whose write meets a closed socket; the loop says so on its next round, as a transport does."""

    async def receive(self) -> Message:
        if not self.lost.is_set():
            await self.lost.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if len(self.sent) == self.lost_after:
            asyncio.get_running_loop().call_soon(self.lost.set)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def answer(connection: Connection, *, stream: bool) -> list[OpenCall]:
    """Send one answer over `connection`; what was delivered."""
    delivered: list[OpenCall] = []
    async with session_of(policy(FakeEngine(replies("hello")))) as session:
        call = await open_call(session, user("hi"))
        await call.done.wait()
        head = ReplyHead(id="0", model="policy", created=0, input_tokens=0)
        app = Answer(
            call=call,
            protocol=Anthropic(),
            head=head,
            stream=stream,
            keep_alive_s=1,
            failures_stop=session.failures_stop,
            on_delivered=delivered.append,
        )
        await app({"type": "http"}, connection.receive, connection.send)
    return delivered


@pytest.mark.parametrize(("stream", "num_messages"), [(False, 4), (True, 5)])
async def test_an_answer_is_delivered_when_it_is_written_and_the_connection_stands(
    stream: bool, num_messages: int
) -> None:
    connection = Connection()
    assert len(await answer(connection, stream=stream)) == 1
    assert len(connection.sent) == num_messages
    assert [message.get("more_body") for message in connection.sent[-2:]] == [True, False]
    assert len(connection.sent[-1]["body"]) == 1


@pytest.mark.parametrize(("stream", "lost_after"), [(False, 2), (True, 3)])
async def test_a_write_that_meets_a_closed_connection_is_no_delivery(stream: bool, lost_after: int) -> None:
    assert await answer(Connection(lost_after=lost_after), stream=stream) == []


async def test_a_stream_ends_when_the_harness_hangs_up_while_the_engine_draws() -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    connection = Connection(lost_after=2)
    async with session_of(policy(engine)) as session:
        app = Answer(
            call=await open_call(session, user("hi")),
            protocol=Anthropic(),
            head=ReplyHead(id="0", model="policy", created=0, input_tokens=0),
            stream=True,
            keep_alive_s=0.01,
            failures_stop=session.failures_stop,
            on_delivered=session.mark_delivered,
        )
        with anyio.fail_after(2):
            await app({"type": "http"}, connection.receive, connection.send)
        assert b"ping" not in connection.body
        assert engine.cancelled == [], "the draw goes on: it is kept for the next try"
