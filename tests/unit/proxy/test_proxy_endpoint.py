"""A model behind an API in the policy's place: what it is asked, what is recorded, and how its failures end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import msgspec
import pytest

from clawhpc.api.client import MAX_WORDS
from clawhpc.errors import EngineError, UserError
from clawhpc.proxy.endpoint import MAX_WAIT_S, Endpoint, EndpointResponder
from clawhpc.proxy.session import Session, derive_seed
from clawhpc.proxy.settings import EndpointProtocol, EndpointSettings
from clawhpc.records import CallRecord, Conversation, Limits, Message, Reply, ToolCall
from clawhpc.tree.prune import prune_tree
from clawhpc.wire.base import ContextOverflow, WireError
from clawhpc.wire.client import Ask
from tests.fakes.caller import ask, open_call, session_of, tool_result, user
from tests.fakes.upstream import MODEL, USAGE, Upstream

pytestmark = pytest.mark.anyio

KEY = "sk-very-secret"
BASE: dict[EndpointProtocol, str] = {"openai": "http://endpoint/v1", "anthropic": "http://endpoint/"}
BUSY = {"error": {"message": "Slow down", "type": "rate_limit_error"}}
both = pytest.mark.parametrize("protocol", BASE)


def error(status: int, message: str, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"message": message}}, headers=headers)


@asynccontextmanager
async def endpoint_of(upstream: Upstream, key: str | None = KEY, **settings: Any) -> AsyncIterator[Endpoint]:
    chosen = {"protocol": upstream.protocol, "base_url": BASE[upstream.protocol], "model": "large"} | settings
    async with Endpoint(
        EndpointSettings(**chosen),
        key,
        window=8000,
        transport=httpx2.MockTransport(upstream),
        first_wait_s=0.001,
    ) as endpoint:
        yield endpoint


@asynccontextmanager
async def asking(upstream: Upstream, limits: Limits | None = None, **settings: Any) -> AsyncIterator[Session]:
    """A session whose calls the endpoint answers."""
    async with endpoint_of(upstream, **settings) as endpoint:
        responder = EndpointResponder(endpoint=endpoint, max_tokens=100, temperature=0.7)
        async with session_of(responder, limits=limits) as session:
            yield session


def only(session: Session) -> CallRecord:
    (call,) = session.calls()
    return call


@both
async def test_a_call_is_recorded_as_text_with_the_model_and_the_usage_that_the_endpoint_names(
    protocol: EndpointProtocol,
) -> None:
    reply = Reply(text="I look.", tool_calls=(ToolCall(id="theirs", name="Bash", arguments='{"command": "ls"}'),))
    upstream = Upstream(script=lambda conversation: reply, protocol=protocol)
    async with asking(upstream) as session:
        said = await ask(session, user("hi"), system="Be brief.")
        await ask(session, user("hi"), said, user([tool_result("call_0_0", "a.txt")]), system="Be brief.")
        first, second = session.calls()
    assert (first.tokens, first.model, first.usage) == (None, MODEL, USAGE)
    assert first.reply is not None
    assert first.reply.text == "I look."
    assert [call.id for call in first.reply.tool_calls] == ["call_0_0"]
    assert (second.continues_id, second.delivered, second.incidents) == (0, True, ())
    assert [message.text for message in upstream.asked[1].messages] == ["Be brief.", "hi", "I look.", "a.txt"]


@both
async def test_the_campaign_chooses_the_sampling_and_the_harness_its_stop_strings(protocol: EndpointProtocol) -> None:
    upstream = Upstream(protocol=protocol)
    async with asking(upstream) as session:
        await ask(session, user("hi"), temperature=0.1, max_tokens=9000, stop_sequences=["END"])
        await ask(session, user("hello"), max_tokens=5)
    first, second = (request.sampling for request in upstream.asked)
    assert (first.temperature, first.max_tokens, first.stop) == (0.7, 100, ("END",))
    assert second.max_tokens == 5
    seeds = [body.get("seed") for body in upstream.bodies]
    assert seeds == ([derive_seed(7, 0), derive_seed(7, 1)] if protocol == "openai" else [None, None])


async def test_fields_that_a_model_refuses_are_left_out_and_one_is_spelled_as_it_wants() -> None:
    upstream = Upstream()
    async with asking(upstream, leave_out=("seed", "temperature"), max_tokens_field="max_tokens") as session:
        await ask(session, user("hi"))
    assert upstream.bodies[0].keys() == {"model", "messages", "max_tokens"}
    assert upstream.bodies[0]["model"] == "large"


@both
async def test_the_key_goes_to_the_endpoint_and_nowhere_else(protocol: EndpointProtocol) -> None:
    refusal = error(401, f"Incorrect API key provided: {KEY}")
    upstream = Upstream(protocol=protocol, failures=[refusal])
    async with asking(upstream) as session:
        await open_call(session, user("hi"))
        await session.wait_stopped()
        call = only(session)
    assert upstream.headers[0]["authorization" if protocol == "openai" else "x-api-key"].endswith(KEY)
    assert "Incorrect API key provided: ***" in call.failure
    assert KEY not in msgspec.json.encode(call).decode()
    assert KEY not in str(session.failure)


async def test_without_a_key_none_is_sent() -> None:
    upstream = Upstream()
    async with endpoint_of(upstream, key=None) as endpoint:
        await endpoint.check()
    assert "authorization" not in upstream.headers[0]


@pytest.mark.parametrize(
    "failure",
    [
        error(429, "Slow down", **{"retry-after": "0.001"}),
        error(529, "Overloaded"),
        error(503, "Unavailable"),
        httpx2.ConnectError("refused"),
        httpx2.RemoteProtocolError("cut off"),
        httpx2.DecodingError("no gzip"),
    ],
)
async def test_a_request_that_was_in_vain_is_sent_again_and_the_call_says_so(
    failure: httpx2.Response | Exception,
) -> None:
    upstream = Upstream(failures=[failure, failure])
    async with asking(upstream) as session:
        await ask(session, user("hi"))
        call = only(session)
    assert call.reply == Reply(text="ok")
    assert len(upstream.bodies) == 3
    assert len(call.incidents) == 2
    assert call.incidents[0].startswith("try 1 was in vain: http://endpoint/v1/chat/completions: ")


async def test_an_endpoint_that_never_answers_ends_the_rollout_as_a_failure_of_the_machine() -> None:
    upstream = Upstream(failures=[error(500, "no")] * 9)
    async with asking(upstream, max_retries=2) as session:
        call = await open_call(session, user("hi"))
        await call.done.wait()
        assert isinstance(session.failure, EngineError)
        assert "asked 3 times in vain" in only(session).failure
    assert len(upstream.bodies) == 3


async def test_what_the_endpoint_refuses_is_not_sent_again_and_its_words_are_kept() -> None:
    upstream = Upstream(failures=[error(400, "Unsupported parameter: 'temperature'")])
    async with asking(upstream) as session:
        call = await open_call(session, user("hi"))
        await call.done.wait()
        assert "400 Unsupported parameter: 'temperature'" in str(session.failure)
    assert len(upstream.bodies) == 1


async def test_an_answer_that_is_none_is_a_failure_of_the_machine() -> None:
    upstream = Upstream(failures=[httpx2.Response(200, content=b"<html>welcome</html>")])
    async with asking(upstream) as session:
        call = await open_call(session, user("hi"))
        await call.done.wait()
        assert "<html>welcome</html>" in str(session.failure)


async def test_a_request_that_hangs_is_given_up_and_sent_again() -> None:
    requests = 0

    async def hang_once(request: httpx2.Request) -> httpx2.Response:
        nonlocal requests
        requests += 1
        if requests == 1:
            await anyio.sleep_forever()
        return Upstream()(request)

    settings = EndpointSettings(base_url="http://endpoint/v1", model="large", timeout_s=0.05)
    async with Endpoint(
        settings, None, window=8000, transport=httpx2.MockTransport(hang_once), first_wait_s=0.0
    ) as endpoint:
        await endpoint.check()
    assert requests == 2


async def test_a_prompt_that_does_not_fit_is_told_to_the_harness_which_may_compact() -> None:
    words = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
    upstream = Upstream(failures=[error(400, words)])
    async with asking(upstream) as session:
        call = await open_call(session, user("hi"))
        await call.done.wait()
        assert isinstance(call.error, ContextOverflow)
        assert (call.error.num_tokens, call.error.maximum) == (9000, 8192)
        assert session.failure is None
        assert session.overflow is call.error
        await ask(session, user("shorter"))


async def test_a_history_that_the_protocol_cannot_say_is_an_error_of_the_harness() -> None:
    async with asking(Upstream()) as session:
        call = await open_call(session, user("hi"), user([tool_result("gone", "a.txt")]))
        await call.done.wait()
        assert isinstance(call.error, WireError)
        assert "messages[1]" in str(call.error)
        assert session.failure is None


async def test_what_the_endpoint_counts_is_what_the_rollout_has_spent() -> None:
    upstream = Upstream()
    async with asking(upstream, limits=Limits(max_sampled_tokens=USAGE.output_tokens + 7)) as session:
        await ask(session, user("one"))
        await ask(session, user("two"))
        with pytest.raises(WireError, match="sampled_tokens"):
            await open_call(session, user("three"))
    assert [body["max_completion_tokens"] for body in upstream.bodies] == [27, 7]


async def test_reinforcement_learning_refuses_what_an_endpoint_has_said() -> None:
    async with asking(Upstream()) as session:
        await ask(session, user("hi"))
        with pytest.raises(ValueError, match="call 0 is a text-only record"):
            prune_tree("r", session.calls(), max_live_leaves=8)


async def test_no_more_requests_are_open_at_a_time_than_the_settings_allow() -> None:
    most = now = 0

    async def slow(request: httpx2.Request) -> httpx2.Response:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await anyio.lowlevel.checkpoint()
        now -= 1
        return Upstream()(request)

    settings = EndpointSettings(base_url="http://endpoint/v1", model="large", max_concurrency=2)
    async with (
        Endpoint(settings, None, window=8000, transport=httpx2.MockTransport(slow)) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(6):
            tasks.start_soon(endpoint.check)
    assert most == 2


async def test_a_check_says_in_one_line_what_the_endpoint_refuses() -> None:
    async with endpoint_of(Upstream(failures=[error(404, "The model `large` does not exist")])) as endpoint:
        with pytest.raises(UserError, match=r"policy\.endpoint: http://endpoint/v1/.* 404 The model `large` does not"):
            await endpoint.check()
        await endpoint.check()
    async with endpoint_of(Upstream(), base_url="http://endpoint/v2") as endpoint:
        with pytest.raises(UserError, match="404"):
            await endpoint.check()


@pytest.mark.parametrize(("said", "wait"), [("0", "0.0 s"), ("", "0.0 s"), ("1e9", f"{MAX_WAIT_S:.1f} s")])
async def test_the_endpoint_says_how_long_to_wait_but_not_for_ever(said: str, wait: str) -> None:
    upstream, notes = Upstream(failures=[error(429, "Slow down", **{"retry-after": said})]), []
    conversation = Conversation(model="", messages=(Message(role="user", text="hi"),))
    request = Ask(model="large", max_tokens=1, temperature=1.0, seed=0)
    async with endpoint_of(upstream) as endpoint:
        with anyio.move_on_after(0.5):
            await endpoint.ask(conversation, request, new_id=str, note=notes.append)
    assert notes[0].endswith(f"the next one after {wait}")
    assert len(upstream.bodies) == (1 if said == "1e9" else 2)


async def test_a_key_is_out_of_a_message_before_that_is_cut() -> None:
    upstream = Upstream(failures=[error(401, "x" * (MAX_WORDS - 20) + f" no such key: {KEY}")])
    async with endpoint_of(upstream) as endpoint:
        with pytest.raises(UserError) as caught:
            await endpoint.check()
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model": "large"}, "base_url is missing"),
        ({"base_url": "http://endpoint"}, "model is missing"),
        ({"base_url": "endpoint:80", "model": "large"}, "base_url must be http.*: endpoint:80"),
        ({"base_url": "http://", "model": "large"}, "base_url must be http"),
        ({"base_url": "http://endpoint:port", "model": "large"}, "base_url must be http"),
        ({"base_url": "http://endpoint/v1", "model": "large", "proxy": "socks5://h"}, "endpoint.proxy must be http"),
        ({"protocol": "gemini"}, "protocol='gemini': allowed are openai, anthropic"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"output_price": -1.0}, "output_price=-1"),
    ],
)
def test_settings_that_make_no_endpoint_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EndpointSettings(**settings)
