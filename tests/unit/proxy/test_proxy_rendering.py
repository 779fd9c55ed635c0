"""A long request is rendered beside the loop: nobody waits for it, and it sees what was known when it came."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import pytest

from clawhpc.engine.render import RecordedReply
from clawhpc.proxy.respond import Draw, PolicyResponder, PolicySampling, Prompt, Response
from clawhpc.proxy.session import ALWAYS_READ_BYTES, BYTES_PER_TOKEN, MAX_OVERFLOWS, RENDERED_HERE_BYTES
from clawhpc.records import Conversation
from clawhpc.wire.base import ContextOverflow, WireError
from tests.fakes.caller import ROOMY, ask, echo, open_call, policy, session_of, user
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.prompts import rebuild_prompt_ids, repeated_calls

pytestmark = pytest.mark.anyio

LONG = "x" * (RENDERED_HERE_BYTES + 1)


@dataclass
class SlowToRender:
    """A policy that renders a long prompt only when it is let."""

    policy: PolicyResponder
    let: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    @property
    def context_window(self) -> int:
        return self.policy.context_window

    def prepare(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> Prompt:
        if LONG in conversation.messages[-1].text:
            self.began.set()
            assert self.let.wait(5), "nobody could let it, because it holds the loop"
        return self.policy.prepare(conversation, recorded)

    def num_new_chars(self, conversation: Conversation, recorded: Mapping[int, RecordedReply]) -> int:
        return self.policy.num_new_chars(conversation, recorded)

    async def respond(self, prompt: Prompt, draw: Draw) -> Response:
        return await self.policy.respond(prompt, draw)

    async def check_drawing(self, *, within_s: float) -> None:
        await self.policy.check_drawing(within_s=within_s)


async def begun(responder: SlowToRender) -> None:
    """Return when a thread has begun to render."""
    assert await anyio.to_thread.run_sync(responder.began.wait, 5)


async def test_other_calls_go_on_while_a_long_one_is_rendered_and_keep_their_order() -> None:
    engine = FakeEngine(lambda prompt: "ok")
    responder = SlowToRender(policy(engine))
    async with session_of(responder) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, session, user(LONG))
        await begun(responder)
        await ask(session, user("short"))
        assert [call.call_id for call in session.calls()] == [1]
        responder.let.set()
    assert [(call.call_id, call.new_messages[0].text) for call in session.calls()] == [(0, LONG), (1, "short")]


async def test_the_same_request_joins_a_call_that_is_still_rendered() -> None:
    engine = FakeEngine(replies("hello"))
    responder = SlowToRender(policy(engine))
    opened: list[int] = []

    async def send() -> None:
        opened.append((await open_call(session, user(LONG))).call_id)

    async with session_of(responder) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await begun(responder)
        tasks.start_soon(send)
        await anyio.wait_all_tasks_blocked()
        responder.let.set()
    assert opened == [0, 0]
    assert len(engine.requests) == 1


async def test_a_long_call_repeats_what_was_drawn_when_it_came_whatever_ends_meanwhile() -> None:
    engine = FakeEngine(replies("one", "one", "two"))
    responder = SlowToRender(policy(engine))
    async with session_of(responder) as session, anyio.create_task_group() as tasks:
        first = await ask(session, user("hi"))
        tasks.start_soon(ask, session, user("hi"), first, user(LONG))
        await begun(responder)
        await ask(session, user("hi"))  # draws the same text again
        responder.let.set()
    calls = session.calls()
    assert [call.continues_id for call in calls] == [None, 0, None]
    assert repeated_calls(calls, 1) == [0]
    assert rebuild_prompt_ids(calls, 1) == engine.requests[-1].prompt_ids


async def test_settling_does_not_wait_for_a_thread() -> None:
    engine = FakeEngine(replies("hello"))
    responder = SlowToRender(policy(engine))
    refused: list[WireError] = []

    async def send() -> None:
        with pytest.raises(WireError) as caught:
            await open_call(session, user(LONG))
        refused.append(caught.value)

    async with session_of(responder) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(send)
        await begun(responder)
        with anyio.fail_after(2):
            await session.settle(0.0)
        (record,) = session.calls()
    responder.let.set()
    assert (record.failure, str(refused[0]), engine.requests) == ("cancelled", "cancelled", [])


async def test_a_long_prompt_that_does_not_fit_is_refused_like_a_short_one() -> None:
    responder = policy(FakeEngine(replies()), PolicySampling(context_window=1000))
    async with session_of(responder) as session:
        for _ in range(MAX_OVERFLOWS):
            with pytest.raises(ContextOverflow):
                await open_call(session, user(LONG))
        assert session.limit == "context"
        assert [call.call_id for call in session.calls()] == [0, 1, 2]


async def test_long_requests_are_counted_beside_the_loop_too() -> None:
    responder = SlowToRender(policy(FakeEngine(replies("a"))))
    counted: list[int] = []

    async def count() -> None:
        conversation = (await open_call(session, user("hi"))).request.conversation
        message = type(conversation.messages[0])(role="user", text=LONG)
        long = Conversation(model="policy", messages=(message,))
        counted.append(await session.count_tokens(long, len(LONG) + 1))

    async with session_of(responder) as session, anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await begun(responder)
        responder.let.set()
    assert counted[0] > len(LONG)


@pytest.mark.parametrize("window", [100, 10**6])
async def test_what_has_too_many_bytes_for_the_window_overflows_it_unread(window: int) -> None:
    async with session_of(policy(FakeEngine(replies()), PolicySampling(context_window=window))) as session:
        most = max(ALWAYS_READ_BYTES, BYTES_PER_TOKEN * window)
        session.refuse_unread(most)
        for _ in range(MAX_OVERFLOWS):
            assert session.limit is None
            with pytest.raises(ContextOverflow) as caught:
                session.refuse_unread(most + 1)
            assert caught.value.num_tokens >= caught.value.maximum == window
        assert session.limit == "context"
        assert session.calls() == ()


async def test_a_reply_is_found_again_in_a_long_history() -> None:
    engine = FakeEngine(replies("one", "two"))
    async with session_of(policy(engine, ROOMY)) as session:
        call = await open_call(session, user(LONG))
        await call.done.wait()
        session.mark_delivered(call)
        await ask(session, user(LONG), echo(call), user("go"))
    assert [record.continues_id for record in session.calls()] == [None, 0]
