"""A request to an API that is slow, endless, packed, or leads elsewhere ends in time, in bounds, and tells no key."""

from __future__ import annotations

import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from clawhpc.api.client import MAX_ANSWER_BYTES, MAX_WORDS, Api, ApiAnswer, NoAnswer

pytestmark = pytest.mark.anyio

KEY = "sk-very-secret"
Talk = Callable[[SocketStream], Awaitable[None]]


class Server:
    """Answers each connection as it is told, and keeps what came."""

    def __init__(self, talk: Talk) -> None:
        self.talk, self.url = talk, ""
        self.came: list[bytes] = []

    async def serve(self, stream: SocketStream) -> None:
        async with stream:
            self.came.append(await stream.receive())
            with suppress(anyio.BrokenResourceError):
                await self.talk(stream)


@asynccontextmanager
async def server_that(talk: Talk) -> AsyncIterator[Server]:
    server = Server(talk)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        server.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}/v1/chat"
        yield server
        tasks.cancel_scope.cancel()


def says(head: str, body: bytes = b"") -> Talk:
    async def talk(stream: SocketStream) -> None:
        await stream.send(f"HTTP/1.1 {head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    return talk


async def ask(url: str, timeout_s: float = 5.0) -> ApiAnswer:
    async with Api(url, KEY, {"authorization": f"Bearer {KEY}"}) as api:
        return await api.post(b'{"a": 1}', timeout_s=timeout_s)


async def test_an_answer_comes_back_whole_and_the_request_asks_for_nothing_packed() -> None:
    async with server_that(says("418 Teapot\r\nX-What: tea", b"no coffee")) as server:
        answer = await ask(server.url)
    assert (answer.status, answer.headers["x-what"], answer.content) == (418, "tea", b"no coffee")
    head, _, body = server.came[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat HTTP/1.1")
    assert b"accept-encoding: identity" in head.lower()
    assert f"authorization: Bearer {KEY}".encode() in head
    assert body == b'{"a": 1}'


async def test_an_answer_that_comes_byte_by_byte_is_given_up_at_the_deadline_of_the_whole() -> None:
    async def trickle(stream: SocketStream) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while True:
            await stream.send(b" ")
            await anyio.sleep(0.02)

    async with server_that(trickle) as server:
        start = anyio.current_time()
        with pytest.raises(NoAnswer, match=r"no answer within 0\.3 s"):
            await ask(server.url, timeout_s=0.3)
        assert anyio.current_time() - start < 3.0


async def test_an_answer_without_end_is_given_up_when_it_is_too_long() -> None:
    sent = 0

    async def pour(stream: SocketStream) -> None:
        nonlocal sent
        await stream.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            await stream.send(bytes(1 << 20))
            sent += 1 << 20

    async with server_that(pour) as server:
        with pytest.raises(NoAnswer, match=f"more than {MAX_ANSWER_BYTES} bytes"):
            await ask(server.url)
    assert sent < 4 * MAX_ANSWER_BYTES


async def test_a_packed_answer_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(1 << 20))
    async with server_that(says("200 OK\r\ncontent-encoding: gzip", bomb)) as server:
        with pytest.raises(NoAnswer, match="content-encoding 'gzip'"):
            await ask(server.url)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    async with server_that(says("200 OK", b"caught")) as elsewhere:
        async with server_that(says(f"{status} There\r\nlocation: {elsewhere.url}")) as server:
            answer = await ask(server.url)
        assert (answer.status, answer.passes) == (status, False)
        assert elsewhere.came == []


async def test_proxies_of_the_environment_are_not_asked_but_the_one_that_is_set_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with server_that(says("200 OK", b"proxy")) as proxy, server_that(says("200 OK", b"endpoint")) as server:
        for variable in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(variable, proxy.url)
        assert (await ask(server.url)).content == b"endpoint"
        async with Api("http://far.example/v1", None, {}, proxy=proxy.url.removesuffix("/v1/chat")) as api:
            assert (await api.post(b"{}", timeout_s=5.0)).content == b"proxy"
    assert proxy.came[0].startswith(b"POST http://far.example/v1 ")


@pytest.mark.parametrize("garbage", [b"\x00\xff" * 50, b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nless", b""])
async def test_what_is_no_whole_answer_is_none(garbage: bytes) -> None:
    async def talk(stream: SocketStream) -> None:
        await stream.send(garbage)

    async with server_that(talk) as server:
        with pytest.raises(NoAnswer, match="RemoteProtocolError"):
            await ask(server.url)


async def test_no_message_holds_the_key_not_even_a_part_of_it_where_it_is_cut() -> None:
    async with Api("http://h", KEY, {}) as api:
        assert api.words(f"Incorrect\n key  {KEY}.") == "Incorrect key ***."
        words = api.words("x" * (MAX_WORDS - 5) + KEY)
    assert words == "x" * (MAX_WORDS - 5) + "***"


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_what_says_nothing_of_the_request_passes(status: int) -> None:
    assert ApiAnswer(status=status, headers={}, content=b"").passes


@pytest.mark.parametrize("status", [200, 204, 302, 400, 401, 403, 404, 413, 422])
def test_what_would_be_said_again_does_not_pass(status: int) -> None:
    assert not ApiAnswer(status=status, headers={}, content=b"").passes


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("", None), ("soon", None), ("inf", None), ("nan", None)],
)
def test_both_forms_of_retry_after_are_read(header: str, seconds: float | None) -> None:
    def waits(said: str) -> float | None:
        return ApiAnswer(status=429, headers={"retry-after": said}, content=b"").retry_after_s(now)

    now = time.time()
    assert waits(header) == seconds
    assert waits(formatdate(now + 90, usegmt=True)) == pytest.approx(90, abs=1)
    assert waits(formatdate(now - 90, usegmt=True)) == 0.0
