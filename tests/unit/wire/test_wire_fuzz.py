"""Ten thousand requests in every state of decay: each gets an answer that its sender can read, and none does harm."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from starlette.types import ASGIApp, Message, Scope

from clawhpc.proxy.app import MAX_BODY_BYTES, build_app
from clawhpc.proxy.respond import PolicyResponder, PolicySampling, ScriptedResponder
from clawhpc.records import CallRecord, Limits, Reply, ToolCall
from clawhpc.wire.base import ErrorKind, WireError, WireProtocol
from clawhpc.wire.protocols import PROTOCOLS
from tests.fakes.caller import session_of
from tests.fakes.engine import FakeEngine
from tests.fakes.exact import LIMITS, draw_apart, make_renderer
from tests.fakes.mangle import REQUESTS, encode, mangled_bodies

SEED = 20_260_915
NUM_BODIES = 10_000
NUM_PER_SESSION = 500
"""A rollout has a few hundred calls at most, and a history is matched against those of its own."""
NUM_RENDERED = 1_000
"""With a true chat format, one of them takes some ten times as long."""
SLOWEST_S = 20.0
"""Of one request, on a machine that is busy with something else; one takes a millisecond."""

PATHS = {
    "anthropic": ("/v1/messages", ""),
    "openai_chat": ("/v1/chat/completions", ""),
    "openai_responses": ("/v1/responses", ""),
    "gemini": ("/v1beta/models/policy:streamGenerateContent", "alt=sse"),
}
REPLY = Reply(
    text="Let me look. 🦀",
    thinking="Hm.",
    tool_calls=(ToolCall(id="call_0", name="Read", arguments='{"path": "a.txt"}'),),
    finish_reason="tool_calls",
)
SAID = 'So.\n<tool_call>\n{"name": "Read", "arguments": {"path": "a.txt"}}\n</tool_call>\nmid <|im_start|> END'


def test_every_protocol_reads_or_refuses_whatever_it_is_given() -> None:
    verdicts = Counter(
        (protocol.name, verdict(protocol, body))
        for _, body in mangled_bodies(SEED, NUM_BODIES)
        for protocol in PROTOCOLS
    )
    expected = {(protocol.name, said) for protocol in PROTOCOLS for said in ("read", ErrorKind.INVALID)}
    assert verdicts.keys() == expected
    assert min(verdicts.values()) > NUM_BODIES // 20, verdicts


def verdict(protocol: WireProtocol, body: bytes) -> str:
    try:
        protocol.parse_request(body)
    except WireError as error:
        return error.kind
    return "read"


@pytest.mark.anyio
async def test_every_request_is_answered_in_its_own_protocol_and_what_is_recorded_can_be_stored() -> None:
    statuses: Counter[int] = Counter()
    bodies = mangled_bodies(SEED, NUM_BODIES)
    while batch := list(islice(bodies, NUM_PER_SESSION)):
        async with session_of(
            ScriptedResponder(script=lambda conversation: REPLY), limits=Limits(max_calls=10 * NUM_PER_SESSION)
        ) as session:
            app = build_app(session, "policy", 5.0, False)
            for protocol, body in batch:
                path, query = PATHS[protocol]
                status, answer = await post(app, session.base_path + path, body, query)
                assert answered(protocol, status, answer), (protocol, status, body, answer)
                statuses[status] += 1
            assert session.failure is None
            calls = session.calls()
        assert msgspec.json.decode(msgspec.json.encode(calls), type=tuple[CallRecord, ...]) == calls
    assert statuses[200] > NUM_BODIES // 10, statuses
    assert statuses[400] > NUM_BODIES // 10, statuses


@pytest.mark.anyio
async def test_what_is_read_can_be_rendered_by_a_chat_format_and_answered_by_a_policy(tmp_path: Path) -> None:
    renderer = make_renderer(tmp_path)
    engine = FakeEngine(lambda prompt: SAID, draw_ids=draw_apart(renderer))
    policy = PolicyResponder(engine=engine, renderer=renderer, sampling=PolicySampling(context_window=10**6))
    bodies = mangled_bodies(SEED + 1, NUM_RENDERED)
    while batch := list(islice(bodies, NUM_PER_SESSION)):
        async with session_of(policy, limits=LIMITS) as session:
            app = build_app(session, "policy", 5.0, False)
            for protocol, body in batch:
                path, query = PATHS[protocol]
                status, answer = await post(app, session.base_path + path, body, query)
                assert answered(protocol, status, answer), (protocol, status, body, answer)
            assert session.failure is None
    assert len(engine.requests) > NUM_RENDERED // 10


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PATHS)
async def test_a_body_that_is_too_large_gets_413_and_a_path_of_no_session_404(protocol: str) -> None:
    path, query = PATHS[protocol]
    async with session_of(ScriptedResponder(script=lambda conversation: REPLY)) as session:
        app = build_app(session, "policy", 5.0, False)
        whole = encode(REQUESTS[protocol])
        status, answer = await post(app, session.base_path + path, whole + b" " * MAX_BODY_BYTES, query)
        assert status == 413
        assert answered(protocol, status, answer)
        for elsewhere in (
            "/s/guess",
            session.base_path[:-1],
            f"{session.base_path}x",
            session.base_path + "/v1/none",
            "",
        ):
            assert (await post(app, elsewhere + path, whole, query))[0] == 404
        await session.settle(0.0)
        status, answer = await post(app, session.base_path + path, whole, query)
        assert status == 404
        assert answered(protocol, status, answer)
        assert not session.calls()


def answered(protocol: str, status: int, answer: bytes) -> bool:
    """`answer` is what a client of `protocol` can read: a reply, or a refusal in the form of its own errors."""
    if status == 200:
        return is_reply(protocol, answer)
    return 400 <= status < 500 and is_error(protocol, status, json.loads(answer))


def is_reply(protocol: str, answer: bytes) -> bool:
    """Plain, or events of which the last one says that the reply has ended."""
    if answer.startswith(b"{"):
        return bool(json.loads(answer).keys() & {"content", "choices", "output", "candidates"})
    last = list(data_of(answer))[-1]
    ending = {"anthropic": '"message_stop"', "openai_chat": "[DONE]", "openai_responses": '"response.completed"'}
    return ending.get(protocol, '"finishReason"') in last


def data_of(stream: bytes) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in stream.decode().split("\n") if line.startswith("data: "))


def is_error(protocol: str, status: int, body: Any) -> bool:
    error = body["error"]
    match protocol:
        case "anthropic":
            return body["type"] == "error" and error.keys() == {"type", "message"}
        case "gemini":
            return error.keys() == {"code", "message", "status"} and error["code"] == status
        case _:
            return error.keys() == {"message", "type", "param", "code"}


async def post(app: ASGIApp, path: str, body: bytes, query: str = "") -> tuple[int, bytes]:
    """Status and whole answer, without a socket."""
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"content-type", b"application/json")],
    }
    sent: list[Message] = []
    waiting = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await anyio.sleep_forever()
        raise AssertionError("a client that hears an answer stays connected")

    async def send(message: Message) -> None:
        sent.append(message)

    with anyio.fail_after(SLOWEST_S):
        await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
