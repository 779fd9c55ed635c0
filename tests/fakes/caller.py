"""A harness that speaks Anthropic to a session directly, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from clawhpc.engine.client import Engine
from clawhpc.proxy.record import OpenCall
from clawhpc.proxy.respond import PolicyResponder, PolicySampling, Responder
from clawhpc.proxy.session import Session
from clawhpc.records import CallRole, Conversation, Limits
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ReplyHead
from tests.fakes.engine import FakeRenderer

AGENT_HEADER = "x-agent-id"
ROOMY = PolicySampling(context_window=100_000, max_tokens=10_000)

Body = dict[str, Any]


def classify(headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
    if AGENT_HEADER in headers:
        return CallRole.SUBAGENT, {AGENT_HEADER: headers[AGENT_HEADER]}
    return CallRole.MAIN, {}


def policy(engine: Engine, sampling: PolicySampling = ROOMY) -> PolicyResponder:
    return PolicyResponder(engine=engine, renderer=FakeRenderer(), sampling=sampling)


@asynccontextmanager
async def session_of(
    responder: Responder, *, limits: Limits | None = None, now: Callable[[], float] = lambda: 1_790_000_000.0
) -> AsyncIterator[Session]:
    """A session without a socket."""
    async with anyio.create_task_group() as tasks:
        session = Session(
            responder=responder, classify=classify, limits=limits or Limits(), seed=7, tasks=tasks, now=now
        )
        yield session
        await session.settle(0.0)


def user(*content: Any) -> Body:
    """A user message: one string, or blocks."""
    return {"role": "user", "content": content[0] if len(content) == 1 else list(content)}


def text(value: str, **fields: Any) -> Body:
    return {"type": "text", "text": value, **fields}


def tool_result(tool_use_id: str, content: str) -> Body:
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": content}


async def open_call(
    session: Session, *messages: Body, headers: Mapping[str, str] | None = None, **fields: Any
) -> OpenCall:
    """Send a request; its answer is not waited for."""
    body = msgspec.json.encode({"model": "policy", "messages": list(messages), **fields})
    wire = Anthropic().parse_request(body)
    return await session.open_call(
        protocol="anthropic",
        request=wire,
        headers=headers or {},
        num_bytes=len(body),
    )


async def ask(
    session: Session,
    *messages: Body,
    deliver: bool = True,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Body:
    """Send a request, take its answer, and return it as the message that a harness would send back."""
    call = await open_call(session, *messages, headers=headers, **fields)
    with anyio.fail_after(5):
        await call.done.wait()
    if deliver:
        session.mark_delivered(call)
    return echo(call)


def echo(call: OpenCall) -> Body:
    """The answer of a call as the message that an exact harness would send back."""
    assert call.response is not None, call.error
    head = ReplyHead(id="0", model="policy", created=0, input_tokens=0)
    body = Anthropic().reply_body(head, call.response.reply, call.response.usage)
    return {"role": "assistant", "content": body["content"]}
