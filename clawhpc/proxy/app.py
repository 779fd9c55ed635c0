"""The HTTP side of one session: routes, bounds, errors."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from clawhpc.errors import ungrouped
from clawhpc.proxy.respond import Responder
from clawhpc.proxy.server import serve
from clawhpc.proxy.session import Classify, Session
from clawhpc.proxy.stream import Answer, error_response, json_response
from clawhpc.records import Limits
from clawhpc.wire.anthropic import Anthropic
from clawhpc.wire.base import (
    ContextOverflow,
    ErrorKind,
    ReplyHead,
    WireError,
    WireProtocol,
    WireRequest,
    invalid,
)
from clawhpc.wire.gemini import Gemini
from clawhpc.wire.openai_chat import OpenAIChat
from clawhpc.wire.openai_responses import OpenAIResponses

KEEP_ALIVE_S = 8.0
"""Between the events of a silent stream. The strictest harness seen gives up after 90 s; 10 s is usual."""
MAX_BODY_BYTES = 64 * 2**20
"""Of a request; one that is larger gets 413. Most windows allow less: `Session.max_bytes`."""
BODY_S = 60.0
"""For a request to arrive whole, over a socket of the same machine. What takes longer does not mean to end."""
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
    strict: bool = False,
    now: Callable[[], float] = time.time,
) -> AsyncIterator[Session]:
    """A session that answers on `socket` until the block ends; `Session.settle` ends it in an orderly way before.

    `model`: the name in the list of models; requests may name any. `strict`: a request with a field that its protocol's
    table does not list is refused. Raises `ProxyError` when the socket cannot be made.
    """
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            session = Session(responder=responder, classify=classify, limits=limits, seed=seed, tasks=tasks, now=now)
            async with serve(build_app(session, model, keep_alive_s, strict), socket, shutdown_s=SHUTDOWN_S):
                try:
                    yield session
                finally:
                    with anyio.CancelScope(shield=True):
                        await session.settle(0.0)


def build_app(session: Session, model: str, keep_alive_s: float, strict: bool) -> ASGIApp:
    """Everything below the session's path, and 404 for all else."""
    anthropic = Anthropic()
    answering = partial(_answer, session, keep_alive_s, strict)
    routes = [
        Route("/v1/messages", partial(answering, anthropic), methods=["POST"]),
        Route("/v1/messages/count_tokens", partial(_count_tokens, session, anthropic), methods=["POST"]),
        Route("/v1/chat/completions", partial(answering, OpenAIChat()), methods=["POST"]),
        Route("/v1/responses", partial(answering, OpenAIResponses()), methods=["POST"]),
        Route("/v1/models", partial(_models, model), methods=["GET"]),
        Route("/v1/models/{model:path}", _model, methods=["GET"]),
        Route("/v1beta/models", partial(_models, model), methods=["GET"]),
        Route("/v1beta/models/{model:path}", _model, methods=["GET"]),
        *_gemini_routes(session, answering),
        Route("/", _probe, methods=["GET", "HEAD"]),
    ]
    base = Route(session.base_path, _probe, methods=["GET", "HEAD"])
    return partial(_watched, session, Starlette(routes=[base, Mount(session.base_path, routes=routes)]))


async def _watched(session: Session, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """After the end there is nothing here; requests for answers hear that in the words of their protocol.

    What escapes from `app` is a bug of ours: the rollout ends as failed by the proxy, without a reward.
    """
    if session.has_ended and scope["type"] == "http" and scope["method"] != "POST":
        app = Response(status_code=404)
    with session.failures_stop("answering a request"):
        await app(scope, receive, send)


def _gemini_routes(session: Session, answering: Callable[..., Awaitable[ASGIApp]]) -> Iterator[Route]:
    """In this API the URL names the model, and the method says whether to stream."""

    async def answer(stream: bool, request: Request) -> ASGIApp:
        protocol = Gemini(request.path_params["model"], stream)
        if stream and request.query_params.get("alt") != "sse":
            return error_response(protocol, invalid("streams are server-sent events only: ask for alt=sse"))
        return await answering(protocol, request)

    for version in ("v1beta", "v1"):
        at = f"/{version}/models/{{model}}"
        yield Route(f"{at}:generateContent", partial(answer, False), methods=["POST"])
        yield Route(f"{at}:streamGenerateContent", partial(answer, True), methods=["POST"])
        yield Route(f"{at}:countTokens", partial(_count_tokens, session, Gemini()), methods=["POST"])


async def _answer(
    session: Session, keep_alive_s: float, strict: bool, protocol: WireProtocol, request: Request
) -> ASGIApp:
    stream = "text/event-stream" in request.headers.get("accept", "")
    try:
        wire, num_bytes = await _read_request(session, protocol, request)
        stream = wire.conversation.stream
        if strict:
            session.refuse_unlisted(wire)
        call = await session.open_call(
            protocol=protocol.name, request=wire, headers=request.headers, num_bytes=num_bytes
        )
    except WireError as error:
        return _refusal(session, protocol, error, stream)
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
        failures_stop=session.failures_stop,
        on_delivered=session.mark_delivered,
    )


async def _count_tokens(session: Session, protocol: Anthropic | Gemini, request: Request) -> Response:
    try:
        wire, num_bytes = await _read_request(session, protocol, request)
        return json_response(protocol.count_body(await session.count_tokens(wire.conversation, num_bytes)))
    except WireError as error:
        return error_response(protocol, error)


def _refusal(session: Session, protocol: WireProtocol, error: WireError, stream: bool) -> Response:
    """What a request hears that no call was opened for. Of Responses' streams, Codex knows an overflow in them only."""
    if not (stream and isinstance(protocol, OpenAIResponses) and isinstance(error, ContextOverflow)):
        return error_response(protocol, error)
    head = ReplyHead(id="none", model="", created=int(session.now()), input_tokens=error.num_tokens)
    events = protocol.opening_event(head) + protocol.error_event(head, error)
    return Response(events, media_type="text/event-stream")


async def _models(model: str, request: Request) -> Response:
    return json_response(_lister(request).models_body(model))


async def _model(request: Request) -> Response:
    """Any name will do, as it does in a request."""
    return json_response(_lister(request).model_body(request.path_params["model"]))


def _lister(request: Request) -> Anthropic | OpenAIChat | Gemini:
    """Three protocols have the same path for their models; two of them have a header that tells them, one a path."""
    if "x-goog-api-key" in request.headers or "/v1beta/" in request.url.path:
        return Gemini()
    return Anthropic() if "anthropic-version" in request.headers else OpenAIChat()


async def _probe(request: Request) -> Response:
    """Harnesses look whether somebody is there."""
    return Response()


async def _read_request(session: Session, protocol: WireProtocol, request: Request) -> tuple[WireRequest, int]:
    """The request, and its size in bytes. Raises `WireError`."""
    with session.failures_stop("reading a request"):
        body = await _read_body(session, request)
        async with session.reading:
            return protocol.parse_request(body), len(body)


async def _read_body(session: Session, request: Request) -> bytes:
    """The whole body, if it can fit the window. One that cannot is received all the same, or its sender would not
    look for the answer; nothing of it is kept.
    """
    session.admit_request()
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        with anyio.fail_after(BODY_S):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > MAX_BODY_BYTES:
                    raise WireError(ErrorKind.TOO_LARGE, f"request body is larger than {MAX_BODY_BYTES} bytes")
                if num_bytes <= session.max_bytes:
                    chunks.append(chunk)
                else:
                    chunks.clear()
    except TimeoutError as error:
        raise WireError(ErrorKind.INVALID, f"the body had not arrived whole after {BODY_S:g} s") from error
    except ClientDisconnect as error:
        raise WireError(ErrorKind.INVALID, "the connection was closed before the whole body had arrived") from error
    session.refuse_unread(num_bytes)
    return b"".join(chunks)
