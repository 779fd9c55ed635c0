"""The HTTP side of one session: routes, bounds, errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from clawhpc.errors import ungrouped
from clawhpc.proxy.respond import Responder
from clawhpc.proxy.server import serve
from clawhpc.proxy.session import Classify, Session
from clawhpc.proxy.stream import Answer, error_response, json_response
from clawhpc.records import Limits
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import ErrorKind, Json, ReplyHead, WireError, WireProtocol
from clawhpc.wire.openai_chat import OpenAIChat

KEEP_ALIVE_S = 8.0
"""Between the events of a silent stream. The strictest harness seen gives up after 90 s; 10 s is usual."""
MAX_BODY_BYTES = 64 * 2**20
"""Of a request; one that is larger gets 413. Most windows allow less: `Session.max_bytes`."""
SHUTDOWN_S = 2.0
"""How long answers may still be written after the session has ended."""


@asynccontextmanager
async def open_session(
    *,
    responder: Responder,
    classify: Classify,
    limits: Limits,
    seed: int,
    socket: Path,
    model: str,
    keep_alive_s: float = KEEP_ALIVE_S,
    now: Callable[[], float] = time.time,
) -> AsyncIterator[Session]:
    """A session that answers on `socket` until the block ends; `Session.settle` ends it in an orderly way before.

    `model`: the name in the list of models; requests may name any. Raises `ProxyError` when the socket cannot be made.
    """
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            session = Session(responder=responder, classify=classify, limits=limits, seed=seed, tasks=tasks, now=now)
            async with serve(build_app(session, model, keep_alive_s), socket, shutdown_s=SHUTDOWN_S):
                try:
                    yield session
                finally:
                    with anyio.CancelScope(shield=True):
                        await session.settle(0.0)


def build_app(session: Session, model: str, keep_alive_s: float) -> ASGIApp:
    """Everything below the session's path, and 404 for all else."""
    anthropic, chat = Anthropic(), OpenAIChat()
    answering = partial(_answer, session, keep_alive_s)
    routes = [
        Route("/v1/messages", partial(answering, anthropic), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count_tokens, session, anthropic), methods=["POST"]),
        Route("/v1/chat/completions", partial(answering, chat), methods=["POST"]),
        Route("/v1/models", partial(_list_models, chat.models_body(model)), methods=["GET"]),
        Route("/", _probe, methods=["GET", "HEAD"]),
    ]
    base = Route(session.base_path, _probe, methods=["GET", "HEAD"])
    return Starlette(routes=[base, Mount(session.base_path, routes=routes)])


async def _answer(session: Session, keep_alive_s: float, protocol: WireProtocol, request: Request) -> ASGIApp:
    try:
        body = await _read_body(session, request)
        wire = protocol.parse_request(body)
        call = await session.open_call(
            protocol=protocol.name,
            request=wire,
            headers=request.headers,
            num_bytes=len(body),
        )
    except WireError as error:
        return error_response(protocol, error)
    assert call.prompt is not None, "an open call was prepared"
    head = ReplyHead(
        id=f"{call.call_id:08d}",
        model=wire.conversation.model,
        created=int(call.received_at),
        input_tokens=call.prompt.num_tokens,
        form=wire.form,
    )
    return Answer(
        call=call,
        protocol=protocol,
        head=head,
        stream=wire.conversation.stream,
        keep_alive_s=keep_alive_s,
        on_delivered=session.mark_delivered,
    )


async def _count_tokens(session: Session, protocol: Anthropic, request: Request) -> Response:
    try:
        body = await _read_body(session, request)
        wire = protocol.parse_request(body)
        return json_response({"input_tokens": await session.count_tokens(wire.conversation, len(body))})
    except WireError as error:
        return error_response(protocol, error)


async def _list_models(body: Json, request: Request) -> Response:
    return json_response(body)


async def _probe(request: Request) -> Response:
    """Harnesses look whether somebody is there."""
    return Response()


async def _read_body(session: Session, request: Request) -> bytes:
    """The whole body, if it can fit the window. One that cannot is received all the same, or its sender would not
    look for the answer; nothing of it is kept.
    """
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > MAX_BODY_BYTES:
                raise WireError(ErrorKind.TOO_LARGE, f"request body is larger than {MAX_BODY_BYTES} bytes")
            if num_bytes <= session.max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
    except ClientDisconnect as error:
        raise WireError(ErrorKind.INVALID, "the connection was closed before the whole body had arrived") from error
    session.refuse_unread(num_bytes)
    return b"".join(chunks)
