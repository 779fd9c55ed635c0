from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx2
import pytest

from clawhpc.engine.transport import UnixTransport

pytestmark = pytest.mark.anyio

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers with bytes that a test writes itself."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[bytes, bytes]] = []
        """Head and body of each."""
        self.num_connections = 0
        self.gone = anyio.Event()
        """Set when the other side of a connection has hung up."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), b":0"
                )
                body = await reader.readexactly(int(length.split(b":")[1]))
                self.requests.append((head, body))
                answering = asyncio.ensure_future(self.answer(body, writer))
                ended = asyncio.ensure_future(reader.read(1)) if body == b"wait" else answering
                await asyncio.wait({answering, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.gone.set()
        writer.close()


@asynccontextmanager
async def talking(folder: Path, answer: Answer, idle_s: float = 60) -> AsyncIterator[tuple[httpx2.AsyncClient, Server]]:
    server, path = Server(answer), folder / "s"
    listening = await asyncio.start_unix_server(server.serve, str(path), limit=2**24)
    transport = UnixTransport(path, idle_s=idle_s)
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
            yield client, server
        await asyncio.sleep(0)
    finally:
        listening.close()


async def whole(body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


async def test_a_request_arrives_and_its_answer_comes_back(tmp_path: Path) -> None:
    async def answer(body: bytes, writer: asyncio.StreamWriter) -> None:
        for part in (b"HTTP/1.1 418 Teapot\r\nx-a: 1\r\ncontent-", b"length: 300000\r\n\r\n", b"x" * 300_000):
            writer.write(part)
            await writer.drain()

    async with talking(tmp_path, answer) as (client, server):
        response = await client.post("/generate", params={"a": "b c"}, content=b"y" * 10**6)
    assert (response.status_code, response.headers["x-a"], response.content) == (418, "1", b"x" * 300_000)
    head, body = server.requests[0]
    assert head.startswith(b"POST /generate?a=b%20c HTTP/1.1\r\n") or head.startswith(
        b"POST /generate?a=b+c HTTP/1.1\r\n"
    )
    assert b"\r\nHost: engine\r\n" in head
    assert body == b"y" * 10**6


async def test_an_answer_in_chunks_is_put_together(tmp_path: Path) -> None:
    async def answer(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n")

    async with talking(tmp_path, answer) as (client, _):
        assert (await client.get("/")).content == b"abcde"


async def test_a_connection_is_used_again_and_two_requests_at_a_time_have_two(tmp_path: Path) -> None:
    async with talking(tmp_path, whole) as (client, server):
        for _ in range(3):
            await client.get("/")
        assert server.num_connections == 1
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(client.get, "/")
    assert (server.num_connections, len(server.requests)) == (2, 5)


@pytest.mark.parametrize("answer", [OK, b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"])
async def test_an_old_connection_and_one_that_the_server_closes_are_not_used_again(
    tmp_path: Path, answer: bytes
) -> None:
    async def say(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with talking(tmp_path, say, idle_s=-1 if answer == OK else 60) as (client, server):
        for _ in range(2):
            assert (await client.get("/")).content == b"ok"
    assert server.num_connections == 2


async def test_a_connection_that_was_closed_while_it_idled_is_not_used_again(tmp_path: Path) -> None:
    async def answer_and_close(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        writer.close()

    async with talking(tmp_path, answer_and_close) as (client, server):
        for _ in range(2):
            assert (await client.get("/")).content == b"ok"
            with anyio.fail_after(5):
                await server.gone.wait()
            server.gone = anyio.Event()
            await anyio.wait_all_tasks_blocked()
    assert server.num_connections == 2


async def test_a_cancelled_request_hangs_up(tmp_path: Path) -> None:
    async def never(body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with talking(tmp_path, never) as (client, server):
        with anyio.move_on_after(0.05):
            await client.post("/", content=b"wait")
        with anyio.fail_after(5):
            await server.gone.wait()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", b"HTTP/1.1 200", b"nonsense\r\n\r\n"]
)
async def test_half_an_answer_and_none_are_errors(tmp_path: Path, answer: bytes) -> None:
    async def break_off(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with talking(tmp_path, break_off) as (client, _):
        with pytest.raises(httpx2.RemoteProtocolError):
            await client.get("/")


async def test_nobody_at_the_socket_is_an_error(tmp_path: Path) -> None:
    async with httpx2.AsyncClient(transport=UnixTransport(tmp_path / "none", idle_s=1)) as client:
        with pytest.raises(httpx2.ConnectError, match="none"):
            await client.get("http://engine/")


async def test_a_connection_with_more_than_its_answer_is_not_used_again(tmp_path: Path) -> None:
    async def twice(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + OK)

    async with talking(tmp_path, twice) as (client, server):
        for _ in range(2):
            assert (await client.get("/")).content == b"ok"
    assert server.num_connections == 2
