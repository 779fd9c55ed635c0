"""A harness gone mad: what it sends, how fast, and over how many connections. Over a real socket, byte by byte."""

from __future__ import annotations

import socket as sockets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import msgspec
import pytest
from anyio.abc import SocketStream
from starlette.types import Receive, Scope, Send

from clawhpc.errors import ProxyError
from clawhpc.proxy.app import open_session
from clawhpc.proxy.server import MAX_CONNECTIONS, MAX_HEAD_BYTES, serve
from clawhpc.proxy.session import REQUESTS_PER_CALL, Session
from clawhpc.records import Limits
from tests.fakes.caller import classify, policy, user
from tests.fakes.engine import FakeEngine
from tests.fakes.sockets import http_request, read_to_the_end

pytestmark = pytest.mark.anyio
PROMPTLY_S = 10.0
"""For what takes milliseconds, on a machine that does much else."""
BODY = msgspec.json.encode({"model": "policy", "max_tokens": 9, "messages": [user("hi")]})


@asynccontextmanager
async def serving(folder: Path, *, limits: Limits | None = None) -> AsyncIterator[tuple[Session, Path]]:
    """A session whose engine says `fine`, and its socket."""
    socket = folder / "p"
    async with open_session(
        responder=policy(FakeEngine(lambda prompt: "fine")),
        classify=classify,
        limits=limits or Limits(),
        seed=0,
        socket=socket,
        model="policy",
    ) as session:
        with anyio.fail_after(60):
            yield session, socket


async def still_answers(session: Session, socket: Path) -> None:
    """A sound request gets its answer, promptly."""
    async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(socket)), timeout=PROMPTLY_S) as client:
        response = await client.post(f"http://proxy{session.base_path}/v1/messages", content=BODY)
    assert response.status_code == 200, response.text


async def send_all(stream: SocketStream, piece: bytes, *, times: int) -> bool:
    """Whether all of it was taken before the other side hung up."""
    try:
        for _ in range(times):
            await stream.send(piece)
    except anyio.BrokenResourceError:
        return False
    return True


@pytest.mark.parametrize(
    "head",
    [b"GET /" + b"x" * 512, b"GET / HTTP/1.1\r\nx: " + b"x" * 512, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100],
    ids=["path", "value", "headers"],
)
async def test_a_head_without_end_is_cut_off(tmp_path: Path, head: bytes) -> None:
    async with serving(tmp_path) as (session, socket):
        async with await anyio.connect_unix(socket) as stream:
            more = b"x: y\r\n" * 100 if head.endswith(b"\r\n") else b"x" * 512
            await stream.send(head)
            assert not await send_all(stream, more, times=40 * MAX_HEAD_BYTES // len(more))
        await still_answers(session, socket)


async def test_a_harness_that_floods_with_connections_cuts_off_its_own_silent_ones(tmp_path: Path) -> None:
    async with serving(tmp_path) as (session, socket):
        streams = [await anyio.connect_unix(socket) for _ in range(3 * MAX_CONNECTIONS)]
        for stream in streams[-MAX_CONNECTIONS:]:
            await stream.send(b"POST /slow")
        await still_answers(session, socket)
        for stream in streams[:MAX_CONNECTIONS]:
            assert (await read_to_the_end(stream)) == b""
        for stream in streams:
            await stream.aclose()


@pytest.mark.parametrize("rounds", range(6))
async def test_a_connection_that_comes_as_the_server_ends_is_cut_off_too(tmp_path: Path, rounds: int) -> None:
    """Between the loop's accepting it and its being known here lie some rounds of the loop."""

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing is asked")

    with sockets.socket(sockets.AF_UNIX) as late:
        async with serve(silent, tmp_path / "p", shutdown_s=1):
            late.connect(str(tmp_path / "p"))
            for _ in range(rounds):
                await anyio.lowlevel.checkpoint()
        with anyio.fail_after(PROMPTLY_S):
            await anyio.wait_readable(late)
        late.setblocking(False)
        with suppress(ConnectionResetError):
            assert late.recv(1) == b"", "the other side has hung up"


async def test_connections_that_wait_for_an_answer_are_not_cut_off_by_newer_ones(tmp_path: Path) -> None:
    release = anyio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    async with serve(wait, tmp_path / "p", shutdown_s=1):
        streams = [await anyio.connect_unix(tmp_path / "p") for _ in range(MAX_CONNECTIONS)]
        for stream in streams:
            await stream.send(http_request("/", b""))
        await anyio.wait_all_tasks_blocked()
        async with await anyio.connect_unix(tmp_path / "p") as one_too_many:
            assert (await read_to_the_end(one_too_many)) == b""
        release.set()
        for stream in streams:
            assert b"200 OK" in await stream.receive()
            await stream.aclose()


async def test_an_upload_without_end_is_given_up_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawhpc.proxy.app.BODY_S", 0.2)
    async with serving(tmp_path) as (session, socket):
        async with await anyio.connect_unix(socket) as stream:
            await stream.send(http_request(f"{session.base_path}/v1/messages", BODY, length=10**6))
            answer = await stream.receive()
        assert b"400 Bad Request" in answer
        assert b"had not arrived whole after 0.2 s" in answer
        await still_answers(session, socket)
        assert len(session.calls()) == 1


async def test_an_upload_that_is_far_too_large_is_told_so_and_then_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawhpc.proxy.app.MAX_BODY_BYTES", 2**20)
    monkeypatch.setattr("clawhpc.proxy.server.MAX_REQUEST_BYTES", 2**22)
    async with serving(tmp_path) as (session, socket):
        async with await anyio.connect_unix(socket) as stream:
            await stream.send(http_request(f"{session.base_path}/v1/messages", b"", length=2**40))
            assert not await send_all(stream, b"x" * 2**16, times=2**7)
            assert b"413" in await read_to_the_end(stream)
        await still_answers(session, socket)


async def test_requests_sent_ahead_by_the_thousand_are_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path) as (session, socket):
        async with await anyio.connect_unix(socket) as stream:
            await send_all(stream, http_request("/", b"") * 1000, times=5)
            assert (await read_to_the_end(stream)).count(b"404 Not Found") < 10
        await still_answers(session, socket)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST / HTTP/1.1\r\nhost: p\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: p\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST / HTTP/1.1\r\nhost: p\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: p\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
    ids=["two lengths", "lengths that differ", "negative", "chunk", "path", "TLS", "version"],
)
async def test_what_is_no_http_is_a_400_and_the_end_of_its_connection(tmp_path: Path, request_bytes: bytes) -> None:
    async with serving(tmp_path) as (session, socket):
        async with await anyio.connect_unix(socket) as stream:
            await stream.send(request_bytes)
            answer = await read_to_the_end(stream)
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1
        await still_answers(session, socket)


async def test_headers_behind_the_body_are_not_kept(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body"})

    async with serve(look, tmp_path / "p", shutdown_s=1), await anyio.connect_unix(tmp_path / "p") as stream:
        head = b"POST / HTTP/1.1\r\nhost: p\r\ntransfer-encoding: chunked\r\n\r\n"
        await stream.send(head + b"3\r\nabc\r\n0\r\nx-late: 1\r\n\r\n")
        await read_to_the_end(stream)
    assert [name for name, _ in seen] == [b"host", b"transfer-encoding"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_far_more_requests_than_calls_end_the_rollout(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, limits=Limits(max_calls=2)) as (session, socket):
        transport = httpx2.AsyncHTTPTransport(uds=str(socket))
        async with httpx2.AsyncClient(transport=transport, timeout=PROMPTLY_S) as client:
            for _ in range(2 * REQUESTS_PER_CALL):
                assert session.limit is None
                await client.post(f"http://proxy{session.base_path}{path}", content=b"nonsense")
            last = await client.post(f"http://proxy{session.base_path}{path}", content=b"nonsense")
        assert "has reached its limit: requests" in last.text
        assert session.limit == "requests"
        assert session.limit_detail == "requests: 41 for 0 calls"
        await session.wait_stopped()


@pytest.mark.parametrize("method", ["parse_request", "reply_body", "turn_events"])
async def test_a_bug_of_ours_is_an_overload_to_the_harness_and_fails_the_proxy_not_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def broken(*_: object) -> object:
        raise KeyError("our bug")

    monkeypatch.setattr(f"clawhpc.wire.anthropic.Anthropic.{method}", broken)
    async with serving(tmp_path) as (session, socket):
        async with await anyio.connect_unix(socket) as stream:
            content = BODY[:-1] + b',"stream":true}' if method == "turn_events" else BODY
            await stream.send(http_request(f"{session.base_path}/v1/messages", content))
            answer = b""
            while b"overloaded_error" not in answer:
                answer += await stream.receive()
            assert answer.startswith(b"HTTP/1.1 200" if method == "turn_events" else b"HTTP/1.1 529")
        assert isinstance(session.failure, ProxyError)
        assert "our bug" in str(session.failure)
        await session.wait_stopped()


async def flood(session: Session, socket: Path, enough: anyio.Event) -> None:
    """Long requests that are refused once they have been read, over many connections, as fast as they are answered."""
    messages = [user("x" * 200) for _ in range(4000)]
    body = msgspec.json.encode({"model": "policy", "messages": messages, "max_tokens": "no"})
    bomb = http_request(f"{session.base_path}/v1/messages", body)

    async def one() -> None:
        async with await anyio.connect_unix(socket) as stream:
            while not enough.is_set():
                await stream.send(bomb)
                await stream.receive()

    async with anyio.create_task_group() as tasks:
        for _ in range(MAX_CONNECTIONS - 1):
            tasks.start_soon(one)


async def test_a_harness_gone_mad_does_not_starve_the_others(tmp_path: Path) -> None:
    """It keeps 63 requests of a megabyte under way, each of which takes the loop for some ms."""
    for name in ("mad", "sane"):
        (tmp_path / name).mkdir()
    roomy = Limits(max_calls=10**6)
    async with (
        serving(tmp_path / "mad", limits=roomy) as (mad, mad_socket),
        serving(tmp_path / "sane") as (sane, sane_socket),
    ):
        enough = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood, mad, mad_socket, enough)
            while mad._num_requests < MAX_CONNECTIONS:
                await anyio.sleep(0.01)
            between: list[int] = []
            for _ in range(5):
                before = mad._num_requests
                await still_answers(sane, sane_socket)
                between.append(mad._num_requests - before)
            enough.set()
        assert max(between) < MAX_CONNECTIONS // 2, "a round of the loop parses one of them, not all that wait"
        assert min(between) > 0
        assert mad.calls() == ()
