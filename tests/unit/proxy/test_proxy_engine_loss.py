"""What becomes of calls whose engine fails, or is lost on the way."""

from __future__ import annotations

import dataclasses
import re

import anyio
import pytest

from clawhpc.engine.client import EngineLost
from clawhpc.errors import EngineError
from clawhpc.proxy.session import MAX_DRAWS
from clawhpc.records import Limits, Reply
from clawhpc.wire.base import ErrorKind, WireError
from tests.fakes.caller import ask, open_call, policy, session_of, user
from tests.fakes.engine import END, FakeEngine, draw, encode_drawn, replies

pytestmark = pytest.mark.anyio


async def test_an_engine_failure_is_the_true_cause_and_stops_the_rollout() -> None:
    engine = FakeEngine(replies(EngineError("the engine died")))
    async with session_of(policy(engine)) as session:
        call = await open_call(session, user("hi"))
        with anyio.fail_after(2):
            await session.wait_stopped()
            await call.done.wait()
        assert isinstance(session.failure, EngineError)
        assert call.error is not None
        assert call.error.kind is ErrorKind.OVERLOADED
        assert session.calls()[0].failure == "the engine died"
        with pytest.raises(WireError) as caught:
            await open_call(session, user("again"))
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert len(engine.requests) == 1


async def test_an_engine_that_is_lost_in_mid_call_is_waited_for_and_draws_the_whole_reply_again() -> None:
    engine = FakeEngine(replies(EngineLost("the engine is gone"), "hello"), back=anyio.Event())
    async with session_of(policy(engine)) as session:
        call = await open_call(session, user("hi"))
        await anyio.wait_all_tasks_blocked()
        assert not call.done.is_set()
        assert engine.back is not None
        engine.back.set()
        await call.done.wait()
        first, second = engine.requests
        assert (first.prompt_ids, first.params) == (second.prompt_ids, second.params)
        assert first.request_id != second.request_id, "an engine may still be letting go of the first"
        (record,) = session.calls()
        assert record.reply == Reply(text="hello")
        assert record.tokens is not None
        assert record.tokens.completion_ids == (*encode_drawn("hello"), END)
        assert record.usage.output_tokens == 6
        assert (session.failure, record.failure) == (None, "")
        lost, back = record.incidents
        assert lost == "draw 1 was lost: the engine is gone"
        assert re.fullmatch(r"the engine was back after [\d.]+ s, and the whole reply was drawn again", back)


async def test_a_request_that_the_engine_gives_up_is_drawn_again() -> None:
    aborted = dataclasses.replace(draw((1,), (2, END), 9), finish_reason="cancelled")
    engine = FakeEngine(replies(aborted, "hello"))
    async with session_of(policy(engine)) as session:
        await ask(session, user("hi"))
        (record,) = session.calls()
    assert record.tokens is not None
    assert record.tokens.completion_ids == (*encode_drawn("hello"), END), "nothing of what was aborted"
    assert "gave up request" in record.incidents[0]


async def test_an_engine_that_does_not_come_back_in_time_is_an_overload_and_ends_the_rollout() -> None:
    engine = FakeEngine(replies(EngineLost("the engine is gone")), back=anyio.Event())
    async with session_of(policy(engine), limits=Limits(engine_wait_s=0.01)) as session:
        call = await open_call(session, user("hi"))
        with anyio.fail_after(2):
            await session.wait_stopped()
            await call.done.wait()
        assert isinstance(session.failure, EngineError)
        assert call.error is not None
        assert call.error.kind is ErrorKind.OVERLOADED
        (record,) = session.calls()
        assert record.failure == "the engine is gone; it was not back within 0.01 s"
        assert record.incidents == ("draw 1 was lost: the engine is gone",)


async def test_a_call_that_waits_for_the_engine_is_cancelled_with_its_session() -> None:
    engine = FakeEngine(replies(EngineLost("the engine is gone")), back=anyio.Event())
    async with session_of(policy(engine)) as session:
        await open_call(session, user("hi"))
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(2):
            await session.settle(0.01)
        (record,) = session.calls()
    assert record.failure == "cancelled"
    assert record.incidents == ("draw 1 was lost: the engine is gone",)


async def test_a_reply_that_is_lost_again_and_again_is_not_drawn_for_ever() -> None:
    engine = FakeEngine(lambda prompt: EngineLost("the engine is gone"))
    async with session_of(policy(engine)) as session:
        await (await open_call(session, user("hi"))).done.wait()
        assert isinstance(session.failure, EngineError)
        assert f"lost {MAX_DRAWS} times" in str(session.failure)
        assert len(engine.requests) == MAX_DRAWS


async def test_a_request_that_the_engine_gives_up_again_and_again_is_an_engine_failure() -> None:
    aborted = dataclasses.replace(draw((1,), (2, END), 9), finish_reason="cancelled")
    engine = FakeEngine(lambda prompt: aborted)
    async with session_of(policy(engine)) as session:
        await (await open_call(session, user("hi"))).done.wait()
        assert isinstance(session.failure, EngineError)
        assert "gave up" in session.calls()[0].failure
        assert session.calls()[0].tokens is None
