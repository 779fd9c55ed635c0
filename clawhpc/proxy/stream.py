"""One answer on its way to the harness.

Streaming is a matter of form only: headers and the opening event at once, a keep-alive of the protocol's own as long as
the engine draws, then the whole turn, parsed once. An answer counts as delivered when all of it was written to a
connection that was still open.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from clawhpc.proxy.record import OpenCall
from clawhpc.records import Reply, Usage
from clawhpc.wire.base import ReplyHead, WireError, WireProtocol

STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def json_response(body: object, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def error_response(protocol: WireProtocol, error: WireError) -> Response:
    """`error` in the words of the protocol."""
    status, body = protocol.error_body(error)
    return json_response(body, status)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An ASGI response: the answer of `call` to one request, of perhaps several that share the call."""

    call: OpenCall
    protocol: WireProtocol
    head: ReplyHead
    stream: bool
    """This request asked for events. A harness that falls back to a plain request shares the call all the same."""
    keep_alive_s: float
    failures_stop: Callable[[str], AbstractContextManager[None]]
    """See `Session.failures_stop`."""
    on_delivered: Callable[[OpenCall], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the call and write its answer; the call goes on without us when the harness hangs up."""
        request = Request(scope, receive)
        if not self.stream:
            await self.call.done.wait()
            status, body = self._whole_body()
            content_length = (b"content-length", str(len(body)).encode())
            await send(_start(status, [(b"content-type", b"application/json"), content_length]))
            await self._deliver(request, send, body)
            return
        opening = self.protocol.opening_event(self.head)
        await send(_start(200, STREAM_HEADERS))
        await send(_body(opening))
        while not await self._done_within(self.keep_alive_s):
            if await request.is_disconnected():
                return
            await send(_body(self.protocol.keep_alive_event(self.head)))
        await self._deliver(request, send, self._turn())

    async def _done_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self.call.done.wait()
        return self.call.done.is_set()

    async def _deliver(self, request: Request, send: Send, data: bytes) -> None:
        """The last byte comes after the mark, so that no harness acts on an answer that does not count as delivered."""
        await send(_body(data[:-1]))
        await send(_body(b""))  # waits until a slow reader has made room
        if self.call.response is not None and not await request.is_disconnected():
            self.on_delivered(self.call)
        await send(_body(data[-1:], more=False))

    def _turn(self) -> bytes:
        try:
            reply, usage = self._reply()
            with self.failures_stop("writing an answer"):
                return b"".join(self.protocol.turn_events(self.head, reply, usage))
        except WireError as error:
            return self.protocol.error_event(self.head, error)

    def _whole_body(self) -> tuple[int, bytes]:
        try:
            reply, usage = self._reply()
            with self.failures_stop("writing an answer"):
                return 200, msgspec.json.encode(self.protocol.reply_body(self.head, reply, usage))
        except WireError as error:
            status, body = self.protocol.error_body(error)
            return status, msgspec.json.encode(body)

    def _reply(self) -> tuple[Reply, Usage]:
        """Raises the `WireError` of a call that has none."""
        if self.call.response is None:
            assert self.call.error is not None, "a call that is done has a response or an error"
            raise self.call.error
        return self.call.response.reply, self.call.response.usage


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
