"""What a command in a sandbox reaches, and what it does not, in both kinds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest

from clawhpc.ledger import Ledger
from clawhpc.sandbox.base import PROXY_PORT, Sandbox, SandboxCommand
from tests.sandbox_parts import python, run

pytestmark = pytest.mark.anyio


@contextmanager
def serving(family: int, address: object, answer: Callable[[socket.socket], None]) -> Iterator[socket.socket]:
    """A server on the host that gives each connection to `answer`, in a thread of its own."""
    with socket.socket(family) as listener:
        listener.bind(address)
        listener.listen(64)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=finish, args=(connection,), daemon=True).start()

        def finish(connection: socket.socket) -> None:
            with connection:
                answer(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1000):
        connection.sendall(data)
    connection.sendall(b" after your end")


async def test_the_hosts_loopback_and_the_world_are_out_of_reach(sandbox: Sandbox) -> None:
    script = """
        import socket, sys
        for address in (("127.0.0.1", int(sys.argv[1])), ("192.0.2.1", 80), ("127.0.0.1", 8377)):
            try:
                socket.create_connection(address, timeout=2)
                print("connected", address)
            except OSError as error:
                print(type(error).__name__)
    """
    with serving(socket.AF_INET, ("127.0.0.1", 0), echo) as listener:
        command = python(script)
        port = str(listener.getsockname()[1])
        result = await run(sandbox, SandboxCommand(sandbox_id="test", argv=(*command.argv, port), env={}, cwd="/"))
    assert result.stdout_tail.split() == ["ConnectionRefusedError", "OSError", "ConnectionRefusedError"]


async def test_the_proxy_is_reached_without_delay_in_both_directions_and_by_many(
    sandbox: Sandbox, ledger: Ledger
) -> None:
    script = f"""
        import socket, threading, time
        def talk(number):
            with socket.create_connection(("127.0.0.1", {PROXY_PORT})) as connection:
                for turn in range(20):  # each byte is answered before the next is sent: nothing may wait in a buffer
                    connection.sendall(b"%d" % (turn % 10))
                    assert connection.recv(10) == b"%d" % (turn % 10)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b" after your end"
                done.append(number)
        done = []
        started = time.monotonic()
        threads = [threading.Thread(target=talk, args=(n,)) for n in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(done), time.monotonic() - started < 5)
    """
    path = ledger.scratch / "proxy.sock"
    with serving(socket.AF_UNIX, str(path), echo):
        result = await run(sandbox, python(script, proxy_socket=path))
    assert (result.stdout_tail, result.stderr_tail) == ("16 True\n", "")


async def test_large_bodies_pass_the_forwarder_whole(sandbox: Sandbox, ledger: Ledger) -> None:
    script = f"""
        import hashlib, socket
        body = bytes(range(256)) * 40000
        with socket.create_connection(("127.0.0.1", {PROXY_PORT})) as connection:
            connection.sendall(body)
            connection.shutdown(socket.SHUT_WR)
            print(connection.makefile("rb").read().decode() == hashlib.sha256(body).hexdigest())
    """

    def digest(connection: socket.socket) -> None:
        import hashlib

        connection.sendall(hashlib.sha256(connection.makefile("rb").read()).hexdigest().encode())

    path = ledger.scratch / "proxy.sock"
    with serving(socket.AF_UNIX, str(path), digest):
        assert (await run(sandbox, python(script, proxy_socket=path))).stdout_tail == "True\n"


async def test_a_proxy_that_has_gone_closes_the_connection(sandbox: Sandbox, ledger: Ledger) -> None:
    path = ledger.scratch / "proxy.sock"
    with socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind(str(path))
    script = f"import socket; print(socket.create_connection(('127.0.0.1', {PROXY_PORT}), timeout=5).recv(10))"
    assert (await run(sandbox, python(script, proxy_socket=path))).stdout_tail == "b''\n"


async def test_the_proxy_learns_that_a_client_has_gone(sandbox: Sandbox, ledger: Ledger) -> None:
    ended = threading.Event()

    def stream(connection: socket.socket) -> None:
        connection.recv(100)
        try:
            while True:
                connection.sendall(b"x" * 1000)
        except OSError:
            ended.set()

    script = f"""
        import socket, time
        connection = socket.create_connection(("127.0.0.1", {PROXY_PORT}))
        connection.sendall(b"go")
        connection.recv(10)
        connection.close()
        time.sleep(0.5)
    """
    path = ledger.scratch / "proxy.sock"
    with serving(socket.AF_UNIX, str(path), stream):
        await run(sandbox, python(script, proxy_socket=path))
        assert await anyio.to_thread.run_sync(ended.wait, 5)
