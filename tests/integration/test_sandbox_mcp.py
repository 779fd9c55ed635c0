"""A server on the host, from inside a real sandbox: reached without network, seen by its own rollout alone."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AsyncExitStack

import anyio
import pytest

from clawhpc.ledger import Ledger
from clawhpc.mcp.host import HostServers, open_servers
from clawhpc.records import McpServer, TaskSpec
from clawhpc.sandbox.base import Sandbox, SandboxCommand
from tests.fakes import mcp_server
from tests.fakes.records import make_task
from tests.sandbox_parts import run, running

pytestmark = pytest.mark.anyio
ADDER = McpServer(name="lab", argv=(sys.executable, "-I", "-S", mcp_server.__file__), on_host=True)
ASK = """
import json, subprocess, sys
messages = [
    {"id": 0, "method": "initialize", "params": {"protocolVersion": "1"}},
    {"id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 2, "b": 3}}},
]
asked = "".join(json.dumps(message) + "\\n" for message in messages)
print(subprocess.run(sys.argv[1:], input=asked, capture_output=True, text=True))
"""
LOOK = """
import os, socket
print(sorted(os.listdir("/run/clawhpc/mcp")))
print(sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else [])
try:
    open("/run/clawhpc/mcp/bridge.py", "a")
except OSError as error:
    print(error.strerror)
try:
    os.unlink("/run/clawhpc/mcp/lab.sock")
except OSError as error:
    print("kept")
"""

HOLD = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
time.sleep(60)
"""


def inside(sandbox: Sandbox, servers: HostServers, task: TaskSpec, script: str) -> SandboxCommand:
    """`script` with the command line of the one server."""
    (server,) = servers.seen_inside((ADDER,), sandbox.python)
    argv = (sandbox.python, "-c", script, *server.argv)
    return SandboxCommand(sandbox_id="test", argv=argv, env={}, cwd="/root", mounts=servers.mounts(task))


async def test_a_server_on_the_host_answers_who_is_in_the_sandbox_and_nobody_else_sees_it(
    sandbox: Sandbox, ledger: Ledger
) -> None:
    failures: list[Exception] = []
    async with AsyncExitStack() as stack:
        opened = []
        for name in ("a", "b"):
            folder = ledger.scratch / name
            folder.mkdir()
            context = open_servers(
                (ADDER,), folder=folder, environment=ledger.environment, fail=failures.append, now=time.time
            )
            opened.append(await stack.enter_async_context(context))
        mine, other = opened
        asked = await run(sandbox, inside(sandbox, mine, make_task(), ASK))
        looked = await run(sandbox, inside(sandbox, mine, make_task(), LOOK))
        unlisted = await run(sandbox, inside(sandbox, HostServers({}, other.traffic), make_task(), ASK))
    assert "the sum is 5" in asked.stdout_tail, asked
    assert [(call.name, json.loads(call.arguments)) for call in mine.traffic.calls()] == [("add", {"a": 2, "b": 3})]
    listed, devices, *kept = looked.stdout_tail.splitlines()
    assert listed == "['bridge.py', 'lab.sock']"
    assert devices in ("[]", "['lo']")
    assert kept == ["Read-only file system", "kept"]
    assert "the sum" not in unlisted.stdout_tail
    assert other.traffic.calls() == ()
    assert failures == []


async def test_a_sandbox_that_is_cancelled_leaves_no_server_of_the_host(
    sandbox: Sandbox, ledger: Ledger, needle: str
) -> None:
    sleeper = McpServer(name="lab", argv=("/bin/sleep", needle), on_host=True)
    with anyio.fail_after(30), anyio.CancelScope() as scope:
        async with (
            open_servers(
                (sleeper,), folder=ledger.scratch, environment=ledger.environment, fail=print, now=time.time
            ) as servers,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(run, sandbox, inside(sandbox, servers, make_task(), HOLD))
            while not running(needle):
                await anyio.sleep(0.05)
            scope.cancel()
    assert running(needle) == []
