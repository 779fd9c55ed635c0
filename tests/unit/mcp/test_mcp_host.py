"""Servers on the host, reached as a harness reaches them: through the bridge, which runs outside a sandbox here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from clawhpc.errors import SandboxError
from clawhpc.mcp import bridge, host
from clawhpc.mcp.host import HostServers, open_servers
from clawhpc.records import McpServer
from tests.fakes import mcp_server
from tests.fakes.records import make_task
from tests.sandbox_parts import running

pytestmark = pytest.mark.anyio
PYTHON = (sys.executable, "-I", "-S")
ADDER = McpServer(name="lab", argv=(*PYTHON, mcp_server.__file__), on_host=True)
START = {"method": "initialize", "params": {"protocolVersion": "2025-06-18"}}


def server(program: str, **env: str) -> McpServer:
    return McpServer(name="lab", argv=(*PYTHON, "-c", program), env=env, on_host=True)


@dataclass
class Opened:
    servers: HostServers
    folder: Path
    failures: list[SandboxError]
    failed: anyio.Event = field(default_factory=anyio.Event)

    def fail(self, error: SandboxError) -> None:
        self.failures.append(error)
        self.failed.set()


@asynccontextmanager
async def opened(*servers: McpServer, folder: Path) -> AsyncIterator[Opened]:
    told = Opened(None, folder, [])  # type: ignore[arg-type]
    with anyio.fail_after(30):
        async with open_servers(
            servers, folder=folder, environment={"CLAWHPC_OWNER": "test"}, fail=told.fail, now=time.time
        ) as told.servers:
            yield told


@dataclass
class Client:
    """A harness's side of the bridge."""

    process: anyio.abc.Process
    lines: BufferedByteReceiveStream
    num_asked: int = 0

    async def ask(self, method: str, **params: object) -> dict[str, object]:
        self.num_asked += 1
        await self.send({"jsonrpc": "2.0", "id": self.num_asked, "method": method, "params": params})
        return json.loads(await self.lines.receive_until(b"\n", 2**20))

    async def send(self, message: object) -> None:
        await self.process.stdin.send(json.dumps(message).encode() + b"\n")

    async def add(self, a: int, b: int) -> str:
        answer = await self.ask("tools/call", name="add", arguments={"a": a, "b": b})
        return answer["result"]["content"][0]["text"]  # type: ignore[index]


@asynccontextmanager
async def bridged(opened: Opened, *, start: bool = True) -> AsyncIterator[Client]:
    argv = (*PYTHON, bridge.__file__, str(opened.servers.sockets["lab"]))
    async with await anyio.open_process(argv, stderr=None) as process:
        client = Client(process, BufferedByteReceiveStream(process.stdout))
        if start:
            await client.ask(START["method"], **START["params"])
        yield client
        await process.stdin.aclose()
        await process.wait()


@pytest.fixture
def folder(ledger_root: Path) -> Path:
    """Whose path is short enough for sockets."""
    return ledger_root


async def test_a_call_reaches_the_server_and_its_answer_comes_back_and_both_are_recorded(folder: Path) -> None:
    async with opened(ADDER, folder=folder) as told, bridged(told) as client:
        assert await client.add(2, 3) == "the sum is 5"
    (call,) = told.servers.traffic.calls()
    assert (call.server, call.name, json.loads(call.arguments)) == ("lab", "add", {"a": 2, "b": 3})
    assert "the sum is 5" in call.result
    assert told.servers.traffic.counts == {"lab connections": 1, "lab initialize": 1}
    assert told.failures == []


async def test_each_connection_has_a_process_of_its_own(folder: Path) -> None:
    counter = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"id": request["id"], "result": {"pid": os.getpid(), "cwd": os.getcwd()}}), flush=True)
"""
    async with opened(server(counter), folder=folder) as told, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(bridged(told)) for _ in range(3)]
        seen = [(await client.ask("resources/read", uri="me"))["result"] for client in clients]
    assert len({one["pid"] for one in seen}) == len({one["cwd"] for one in seen}) == 3  # type: ignore[index]
    assert [call.connection for call in told.servers.traffic.calls()] == [0, 1, 2]


async def test_a_server_has_what_it_is_given_and_nothing_of_our_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "1")
    tell = """
import json, os, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "result": dict(os.environ)}), flush=True)
"""
    wanted = {"NOTE": "hello", "CLAWHPC_OWNER": "nobody", "CLAWHPC_MCP": "nobody"}  # by these the dead are found
    async with opened(server(tell, **wanted), folder=folder) as told, bridged(told) as client:
        seen = (await client.ask("resources/read", uri="env"))["result"]
    assert isinstance(seen, dict)
    assert {"NOTE", "PATH", "HOME", "LANG", "CLAWHPC_OWNER", "CLAWHPC_MCP"} >= seen.keys() - {"LC_CTYPE"}
    assert (seen["NOTE"], seen["CLAWHPC_OWNER"]) == ("hello", "test")
    assert seen["CLAWHPC_MCP"] != "nobody"
    assert Path(seen["HOME"]).is_relative_to(folder)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit('no database')", "the server ended with exit code 1: no database"),
        ("pass", "the server ended with exit code 0"),
        ("input(); raise SystemExit(3)", "the server ended with exit code 3"),
    ],
)
async def test_a_server_that_ends_before_it_is_ready_has_failed(folder: Path, program: str, why: str) -> None:
    async with opened(server(program), folder=folder) as told, bridged(told, start=False) as client:
        await client.send({"id": 1, **START})
        assert await client.process.wait() == 1
        await told.failed.wait()
    assert [str(failure) for failure in told.failures] == [f"MCP server lab on the host: {why}"]


async def test_a_server_that_closes_its_output_before_it_is_ready_has_failed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "GRACE_S", 0.2)
    mute = server("import os, time; os.close(1); time.sleep(60)")
    async with opened(mute, folder=folder) as told, bridged(told, start=False) as client:
        assert await client.process.wait() == 1
    assert [str(failure) for failure in told.failures] == ["MCP server lab on the host: the server closed its output"]


async def test_a_program_that_is_not_there_has_failed(folder: Path) -> None:
    absent = McpServer(name="lab", argv=("/no/such/program",), on_host=True)
    async with opened(absent, folder=folder) as told, bridged(told, start=False) as client:
        assert await client.process.wait() == 1
    assert [str(failure) for failure in told.failures] == [
        "MCP server lab on the host: cannot start /no/such/program: No such file or directory"
    ]


async def test_a_server_that_does_not_answer_in_time_has_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MCP_START_S", 0.3)
    async with (
        opened(server("import time; time.sleep(60)"), folder=folder) as told,
        bridged(told, start=False) as client,
    ):
        await client.send({"id": 1, **START})
        assert await client.process.wait() == 1
    assert "the server answered nothing within 0.3 s" in str(told.failures)


async def test_a_server_that_is_given_up_before_it_is_ready_has_failed(folder: Path) -> None:
    async with opened(server("import sys; sys.stdin.read()"), folder=folder) as told:
        async with bridged(told, start=False) as client:
            await client.send({"id": 1, **START})
        await told.failed.wait()
    assert [str(failure) for failure in told.failures] == ["MCP server lab on the host: its client has gone"]


async def test_a_client_that_asks_nothing_blames_nobody(folder: Path) -> None:
    async with opened(ADDER, folder=folder) as told, bridged(told, start=False):
        pass
    assert told.failures == []


async def test_a_server_that_dies_later_answers_its_last_call_with_how_it_ended(folder: Path) -> None:
    dies = """
import json, sys
print(json.dumps({"id": json.loads(input())["id"], "result": {}}), flush=True)
input()
sys.exit("out of luck")
"""
    async with opened(server(dies), folder=folder) as told, bridged(told) as client:
        await client.send({"id": 2, "method": "tools/call", "params": {"name": "add"}})
        assert await client.process.wait() == 1
    (call,) = told.servers.traffic.calls()
    assert call.error == "the server ended with exit code 1: out of luck"
    assert told.failures == []


async def test_a_call_that_is_open_when_the_rollout_ends_says_so(folder: Path) -> None:
    hangs = """
import json, time
print(json.dumps({"id": json.loads(input())["id"], "result": {}}), flush=True)
time.sleep(60)
"""
    async with opened(server(hangs), folder=folder) as told:
        argv = (*PYTHON, bridge.__file__, str(told.servers.sockets["lab"]))
        process = await anyio.open_process(argv)
        client = Client(process, BufferedByteReceiveStream(process.stdout))
        await client.ask(START["method"])
        await client.send({"id": 2, "method": "tools/call", "params": {"name": "add"}})
        while not told.servers.traffic.calls():
            await anyio.sleep(0.01)
    await process.aclose()
    assert [call.error for call in told.servers.traffic.calls()] == ["the rollout was over"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_a_server_that_floods_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    monkeypatch.setattr(host, "MAX_BYTES", 2**20)
    flood = f"import sys\nwhile True: sys.{stream}.write('x' * 1000 + chr(10))"
    async with opened(server(flood), folder=folder) as told:
        argv = (*PYTHON, bridge.__file__, str(told.servers.sockets["lab"]))
        async with await anyio.open_process(argv, stdout=None if stream == "stderr" else -3) as process:
            assert await process.wait() == 1
        await told.failed.wait()
    assert "more than 1 MB on one connection" in str(told.failures[0])


async def test_a_client_that_floods_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_MESSAGES", 100)
    async with opened(ADDER, folder=folder) as told, bridged(told) as client:
        await client.process.stdin.send(b"\n" * 101)
        assert await client.process.wait() == 1
    assert told.failures == []


async def test_one_connection_too_many_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MAX_OPEN", 1)
    monkeypatch.setattr(host, "MAX_STARTED", 2)
    async with opened(ADDER, folder=folder) as told:
        async with bridged(told), bridged(told, start=False) as second:
            assert await second.process.wait() == 1
        async with bridged(told):
            pass
        async with bridged(told, start=False) as fourth:
            assert await fourth.process.wait() == 1
    assert told.servers.traffic.counts["lab connections refused"] == 2
    assert told.servers.traffic.counts["lab connections"] == 2


async def test_nothing_is_left_when_the_rollout_is_cancelled_in_the_middle(folder: Path, needle: str) -> None:
    leaves = f"""
import json, subprocess, time
subprocess.Popen(["setsid", "sleep", "{needle}"])
subprocess.Popen(["sleep", "{needle}"], start_new_session=True)
print(json.dumps({{"id": json.loads(input())["id"], "result": {{}}}}), flush=True)
time.sleep(60)
"""
    with anyio.CancelScope() as scope:
        async with opened(server(leaves), folder=folder) as told, bridged(told):
            assert len(running(needle)) >= 2
            scope.cancel()
            await anyio.sleep_forever()
    assert running(needle) == []


async def test_the_bridge_says_when_there_is_no_server(tmp_path: Path) -> None:
    done = await anyio.run_process((*PYTHON, bridge.__file__, str(tmp_path / "none")), check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == f"no MCP server behind {tmp_path}/none: No such file or directory\n"


async def test_a_harness_is_told_of_the_bridge_and_the_sandbox_shows_it(folder: Path) -> None:
    inner = McpServer(name="inner", argv=("/mcp/server",), env={"A": "1"})
    task = replace(make_task(), mcp_dir="/a", run_mcp_dir="/b")
    async with opened(inner, ADDER, folder=folder) as told:
        seen = told.servers.seen_inside((inner, ADDER), "/usr/bin/python3")
        mounts = told.servers.mounts(task)
    *programs, bridge_, socket = [mount.target for mount in mounts]
    assert seen[0] == inner
    assert seen[1].argv == ("/usr/bin/python3", "-I", "-S", bridge_, socket)
    assert (seen[1].name, seen[1].env) == ("lab", {})
    assert programs == ["/mcp", "/mcp_run"]
    assert not any(mount.writable for mount in mounts)


async def test_without_servers_on_the_host_nothing_is_shown(folder: Path) -> None:
    async with opened(McpServer(name="inner", argv=("/mcp/server",)), folder=folder) as told:
        assert told.servers.mounts(make_task()) == ()
    assert list(folder.iterdir()) == []
