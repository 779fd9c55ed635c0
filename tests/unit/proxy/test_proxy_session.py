from __future__ import annotations

import anyio
import pytest

from clawhpc.engine.client import PromptTooLong
from clawhpc.errors import ProxyError
from clawhpc.proxy.respond import PolicySampling, ScriptedResponder
from clawhpc.proxy.session import ANSWERS_THAT_HELP, MAX_IN_FLIGHT, MAX_OVERFLOWS, derive_seed
from clawhpc.records import CallRole, Limits, Message, Reply, ToolCall
from clawhpc.wire.base import ContextOverflow, ErrorKind, WireError
from tests.fakes.caller import AGENT_HEADER, ask, echo, open_call, policy, session_of, text, tool_result, user
from tests.fakes.engine import END, FakeEngine, encode_drawn, replies
from tests.fakes.prompts import rebuild_prompt_ids

pytestmark = pytest.mark.anyio


async def test_a_call_is_recorded_with_what_the_engine_received_and_drew() -> None:
    engine = FakeEngine(replies("hello"))
    async with session_of(policy(engine)) as session:
        await ask(session, user("hi"), system="Be brief.", temperature=0.2)
        (call,) = session.calls()
    assert call.tokens is not None
    assert call.tokens.suffix_ids == engine.requests[0].prompt_ids
    assert call.tokens.completion_ids == (*encode_drawn("hello"), END)
    assert len(call.tokens.sampling_logprobs) == len(call.tokens.completion_ids)
    assert call.reply == Reply(text="hello")
    assert call.requested.temperature == 0.2
    assert call.new_messages == (Message(role="system", text="Be brief."), Message(role="user", text="hi"))
    assert (call.usage.input_tokens, call.usage.output_tokens) == (len(engine.requests[0].prompt_ids), 6)
    assert (call.role, call.protocol, call.delivered, call.failure) == (CallRole.MAIN, "anthropic", True, "")
    assert (call.parent_id, call.continues_id, call.conversation_id, call.tools_same) == (None, None, 0, False)


async def test_the_campaign_chooses_the_sampling_whatever_the_harness_asks_for() -> None:
    engine = FakeEngine(replies("a", "b"))
    sampling = PolicySampling(context_window=1000, max_tokens=50, temperature=0.7)
    async with session_of(policy(engine, sampling)) as session:
        await ask(session, user("hi"), temperature=0.0, top_p=0.1, max_tokens=32_000)
        await ask(session, user("hello"), max_tokens=5)
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.max_tokens, first.stop_token_ids) == (0.7, 50, (END,))
    assert second.max_tokens == 5
    assert (first.seed, second.seed) == (derive_seed(7, 0), derive_seed(7, 1))
    assert first.seed != second.seed


async def test_the_same_request_joins_the_call_in_flight() -> None:
    engine = FakeEngine(replies("hello"), gate=anyio.Event())
    async with session_of(policy(engine)) as session:
        first = await open_call(session, user("hi"))
        second = await open_call(session, user("hi"))
        assert first is second
        assert engine.gate is not None
        engine.gate.set()
        await first.done.wait()
        assert len(engine.requests) == len(session.calls()) == 1


async def test_an_answer_that_was_never_delivered_is_given_again() -> None:
    engine = FakeEngine(replies("hello", "again"))
    async with session_of(policy(engine)) as session:
        await ask(session, user("hi"), deliver=False)
        assert [call.delivered for call in session.calls()] == [False]
        replayed = await ask(session, user("hi"))
        assert replayed["content"] == [text("hello")]
        assert [call.delivered for call in session.calls()] == [True]
        regenerated = await ask(session, user("hi"))
        assert regenerated["content"] == [text("again")]
        assert len(engine.requests) == len(session.calls()) == 2


async def test_a_late_second_delivery_does_not_end_the_next_call() -> None:
    engine = FakeEngine(replies("hello", "again"))
    async with session_of(policy(engine)) as session:
        first = await open_call(session, user("hi"))
        await first.done.wait()
        session.mark_delivered(first)
        second = await open_call(session, user("hi"))
        session.mark_delivered(first)
        assert await open_call(session, user("hi")) is second
        await second.done.wait()
        assert [call.delivered for call in session.calls()] == [True, False]


async def test_twin_subagents_with_equal_requests_are_two_calls() -> None:
    engine = FakeEngine(replies("one", "two"))
    async with session_of(policy(engine)) as session:
        left = await open_call(session, user("look"), headers={AGENT_HEADER: "1"})
        right = await open_call(session, user("look"), headers={AGENT_HEADER: "2"})
        assert left is not right
        await left.done.wait()
        await right.done.wait()
        assert len(session.calls()) == 2


async def test_a_call_that_ends_after_a_later_one_is_nobodys_parent_by_mistake() -> None:
    slow, fast = anyio.Event(), FakeEngine(lambda prompt: "x")
    async with session_of(policy(fast)) as session:
        fast.gate = slow
        first = await open_call(session, user("same head, first"))
        await anyio.wait_all_tasks_blocked()
        fast.gate = None
        await ask(session, user("same head, second"))
        slow.set()
        await first.done.wait()
        await ask(session, user("same head, first"), echo(first), user("go"))
        calls = session.calls()
    assert [call.call_id for call in calls] == [0, 1, 2]
    assert [call.parent_id for call in calls] == [None, None, 0]
    for call in calls:
        by_prompt = {request.prompt_ids for request in fast.requests}
        assert rebuild_prompt_ids(calls, call.call_id) in by_prompt


async def test_settling_waits_for_calls_and_then_cancels_them_in_the_engine() -> None:
    engine = FakeEngine(replies("a", "b"), gate=anyio.Event())
    async with session_of(policy(engine)) as session:
        call = await open_call(session, user("hi"))
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(2):
            await session.settle(0.01)
        assert len(engine.cancelled) == 1
        (record,) = session.calls()
        assert (record.reply, record.tokens, record.failure) == (None, None, "cancelled")
        assert call.error is not None
        with pytest.raises(WireError) as caught:
            await open_call(session, user("hi"))
        assert caught.value.kind is ErrorKind.NOT_FOUND


async def test_settling_lets_a_call_end_in_time() -> None:
    engine = FakeEngine(replies("a"), gate=anyio.Event())
    async with session_of(policy(engine)) as session, anyio.create_task_group() as tasks:
        await open_call(session, user("hi"))
        tasks.start_soon(session.settle, 5.0)
        await anyio.wait_all_tasks_blocked()
        assert engine.gate is not None
        engine.gate.set()
    assert engine.cancelled == []
    assert session.calls()[0].reply == Reply(text="a")


async def test_whatever_else_breaks_is_a_failure_of_the_proxy_and_names_the_call() -> None:
    def broken(conversation: object) -> Reply:
        raise KeyError("script")

    async with session_of(ScriptedResponder(script=broken)) as session:
        await (await open_call(session, user("hi"))).done.wait()
        assert isinstance(session.failure, ProxyError)
        assert "answering call 0: KeyError" in str(session.failure)


@pytest.mark.parametrize(
    ("limits", "limit"),
    [(Limits(max_calls=2), "calls"), (Limits(max_sampled_tokens=4), "sampled_tokens")],
)
async def test_a_limit_refuses_the_next_call_and_stops_the_rollout(limits: Limits, limit: str) -> None:
    engine = FakeEngine(lambda prompt: "abc")
    async with session_of(policy(engine), limits=limits) as session:
        await ask(session, user("a"))
        if limit == "calls":
            await ask(session, user("b"))
        assert session.limit is None
        with pytest.raises(WireError) as caught:
            await open_call(session, user("c"))
        assert caught.value.kind is ErrorKind.LIMIT
        assert session.limit == limit
        assert session.limit_detail.startswith(f"{limit}: ")
        with anyio.fail_after(1):
            await session.wait_stopped()


async def test_completions_are_cut_to_what_is_left_of_window_and_budget() -> None:
    engine = FakeEngine(lambda prompt: "abc")
    async with session_of(policy(engine), limits=Limits(max_sampled_tokens=6)) as session:
        await ask(session, user("a"))
        await ask(session, user("b"))
    assert [request.params.max_tokens for request in engine.requests] == [6, 2]
    engine = FakeEngine(lambda prompt: "abc")
    async with session_of(policy(engine, PolicySampling(context_window=21))) as session:
        await ask(session, user("a"))
    (request,) = engine.requests
    assert len(request.prompt_ids) + request.params.max_tokens == 21


async def test_a_prompt_that_does_not_fit_is_refused_and_the_third_one_is_a_limit() -> None:
    engine = FakeEngine(lambda prompt: "abc")
    async with session_of(policy(engine, PolicySampling(context_window=40))) as session:
        for attempt in range(MAX_OVERFLOWS):
            assert session.limit is None
            with pytest.raises(ContextOverflow) as caught:
                await open_call(session, user("x" * 50))
            assert (caught.value.num_tokens, caught.value.maximum) == (69, 40)
            assert session.calls()[attempt].failure == "prompt of 69 tokens, but the window holds 40"
        assert session.limit == "context"
        assert engine.requests == []


async def test_a_harness_that_compacts_with_success_may_overflow_again_and_again() -> None:
    engine = FakeEngine(lambda prompt: "abc")
    async with session_of(policy(engine, PolicySampling(context_window=40))) as session:
        for _ in range(3):
            for _ in range(MAX_OVERFLOWS - 1):
                with pytest.raises(ContextOverflow):
                    await open_call(session, user("x" * 50))
            for _ in range(ANSWERS_THAT_HELP):
                await ask(session, user("short"))
        assert session.limit is None


async def test_a_compaction_that_looks_like_the_main_loop_does_not_keep_a_loop_of_overflows_alive() -> None:
    engine = FakeEngine(lambda prompt: "a summary")
    async with session_of(policy(engine, PolicySampling(context_window=50))) as session:
        for _ in range(MAX_OVERFLOWS):
            assert session.limit is None
            await ask(session, user("summarise"))
            with pytest.raises(ContextOverflow):
                await open_call(session, user("x" * 50))
        assert session.limit == "context"
        assert session.limit_detail == (
            "context: 3 times what was sent did not fit, at last a prompt of 69 tokens, but the window holds 50"
        )
        assert len(engine.requests) == MAX_OVERFLOWS


async def test_a_harness_gone_mad_has_no_more_calls_in_flight_than_its_share() -> None:
    engine = FakeEngine(lambda prompt: "abc", gate=anyio.Event())
    async with session_of(policy(engine), limits=Limits(max_calls=100)) as session:
        for number in range(MAX_IN_FLIGHT):
            await open_call(session, user(f"call {number}"))
        with pytest.raises(WireError) as caught:
            await open_call(session, user("one more"))
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert (session.failure, session.limit) == (None, None)
        joined = await open_call(session, user("call 3"))
        assert engine.gate is not None
        engine.gate.set()
        await joined.done.wait()
        await ask(session, user("one more"))
        assert len(session.calls()) == MAX_IN_FLIGHT + 1


async def test_an_answer_to_another_than_the_main_loop_does_not_show_that_it_was_helped() -> None:
    engine = FakeEngine(lambda prompt: "abc")
    async with session_of(policy(engine, PolicySampling(context_window=40))) as session:
        for _ in range(MAX_OVERFLOWS):
            assert session.limit is None
            await ask(session, user("short"), headers={AGENT_HEADER: "a"})
            with pytest.raises(ContextOverflow):
                await open_call(session, user("x" * 50))
        assert session.limit == "context"


async def test_an_overflow_that_only_the_engine_sees_counts_too_and_is_tried_anew() -> None:
    engine = FakeEngine(lambda prompt: PromptTooLong(num_tokens=50, maximum=40))
    async with session_of(policy(engine)) as session:
        for _ in range(MAX_OVERFLOWS):
            call = await open_call(session, user("hi"))
            await call.done.wait()
            assert isinstance(call.error, ContextOverflow)
        assert (session.limit, session.failure) == ("context", None)
        assert len(engine.requests) == len(session.calls()) == MAX_OVERFLOWS


async def test_counting_tokens_sees_the_same_prompt_and_records_nothing() -> None:
    engine = FakeEngine(lambda prompt: "abc")
    async with session_of(policy(engine, PolicySampling(context_window=100))) as session:
        short = await open_call(session, user("hi"))
        assert short.prompt is not None
        assert await session.count_tokens(short.request.conversation, 100) == short.prompt.num_tokens
        with pytest.raises(ContextOverflow) as caught:
            await open_call(session, user("x" * 100))
        conversation = short.request.conversation
        long = type(conversation)(model="m", messages=(Message(role="user", text="x" * 100),))
        assert await session.count_tokens(long, 100) == caught.value.num_tokens
        await short.done.wait()
        assert len(session.calls()) == 2


async def test_a_script_leaves_text_without_tokens() -> None:
    def oracle(conversation: object) -> Reply:
        return Reply(tool_calls=(ToolCall(id="t", name="Bash", arguments="{}"),), finish_reason="tool_calls")

    async with session_of(ScriptedResponder(script=oracle)) as session:
        reply = await ask(session, user("a"))
        await ask(session, user("a"), reply, user([tool_result("t", "b")]))
        first, second = session.calls()
    assert (first.tokens, second.tokens, second.parent_id) == (None, None, None)
    assert (second.continues_id, second.new_messages) == (0, (Message(role="tool", text="b", tool_call_id="t"),))


async def test_tools_are_stored_once_and_again_when_they_change() -> None:
    bash = {"name": "Bash", "description": "", "input_schema": {"type": "object"}}
    read = {**bash, "name": "Read"}
    engine = FakeEngine(lambda prompt: "ok")
    async with session_of(policy(engine)) as session:
        history = [user("a")]
        for tools in ([bash], [bash], [bash, read], [bash, read]):
            history += [await ask(session, *history, tools=tools), user("b")]
        calls = session.calls()
    assert [call.tools_same for call in calls] == [False, True, False, True]
    assert [len(call.tools) for call in calls] == [1, 0, 2, 0]
