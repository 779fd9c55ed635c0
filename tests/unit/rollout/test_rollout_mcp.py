"""Servers on the host in a rollout: its own alone, for as long as its harness runs, and recorded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from clawhpc.harness.base import mcp_entry
from clawhpc.records import ExecResult, LaunchPlan, LaunchRequest, McpServer, Outcome, RolloutRecord
from clawhpc.rollout.run import run_rollout
from clawhpc.sandbox.base import SandboxCommand
from tests.fakes import mcp_server
from tests.fakes.records import make_task
from tests.fakes.rollout import OK, FakeHarness, FakeSandbox, Program, one_call, parts_of, plan_of
from tests.sandbox_parts import running

pytestmark = pytest.mark.anyio
HELLO = [
    {"id": 0, "method": "initialize", "params": {"protocolVersion": "1"}},
    {"id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 2, "b": 3}}},
]


class Mounting(FakeHarness):
    """Says in a file which servers it was told of."""

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        servers = {server.name: mcp_entry(server) for server in request.mcp_servers}
        return replace(super().launch_plan(request), files={"servers.json": json.dumps(servers)})


def outside(command: SandboxCommand, target: str) -> str:
    """Where a path inside lies on the host."""
    return next((str(mount.source) for mount in command.mounts if mount.target == target), target)


async def use(command: SandboxCommand, name: str = "lab") -> list[str]:
    """What a harness does with a server: start what it was told, ask, read the answers."""
    assert command.home is not None
    entry = json.loads((command.home / "servers.json").read_text())[name]
    argv = [outside(command, word) for word in (entry["command"], *entry["args"])]
    asked = "".join(json.dumps(message) + "\n" for message in HELLO).encode()
    return (await anyio.run_process(argv, input=asked, check=False)).stdout.decode().splitlines()


async def roll(ledger_root: Path, program: Program, *servers: McpServer) -> RolloutRecord:
    task = replace(make_task(), mcp_servers=servers)
    parts = replace(parts_of(ledger_root, FakeSandbox(program)), harness=Mounting())
    with anyio.fail_after(60):
        record = await run_rollout(plan_of(task), parts)
    assert list(ledger_root.iterdir()) == []
    return record


def hosted(*argv: str, name: str = "lab") -> McpServer:
    return McpServer(name=name, argv=(sys.executable, "-I", "-S", *argv), on_host=True)


async def test_a_server_on_the_host_answers_and_the_record_has_what_it_was_asked(ledger_root: Path) -> None:
    async def program(command: SandboxCommand) -> ExecResult:
        assert "the sum is 5" in (await use(command))[1]
        return await one_call(command)

    record = await roll(ledger_root, program, hosted(mcp_server.__file__))
    assert record.outcome is Outcome.COMPLETED
    assert [(call.server, call.name, call.arguments) for call in record.mcp_calls] == [
        ("lab", "add", '{"a": 2, "b": 3}')
    ]
    assert record.mcp_counts == {"lab connections": 1, "lab initialize": 1}


async def test_a_server_that_does_not_start_is_a_failure_of_the_machine_with_what_it_said(ledger_root: Path) -> None:
    async def go_on_without(command: SandboxCommand) -> ExecResult:
        assert await use(command) == []
        await anyio.sleep_forever()
        return OK

    record = await roll(ledger_root, go_on_without, hosted("-c", "raise SystemExit('no such database')"))
    assert record.outcome is Outcome.SANDBOX_FAILED
    assert record.detail == "MCP server lab on the host: the server ended with exit code 1: no such database"
    assert record.verdict is None


async def test_a_server_that_fails_after_the_first_reply_may_be_the_policys_doing_and_trains(ledger_root: Path) -> None:
    async def use_later(command: SandboxCommand) -> ExecResult:
        await one_call(command)
        assert await use(command) == []
        return OK

    record = await roll(ledger_root, use_later, hosted("-c", "raise SystemExit(1)"))
    assert record.outcome is Outcome.COMPLETED
    assert record.trains


async def test_a_sandbox_sees_the_sockets_of_its_own_servers_and_no_server_outlives_the_harness(
    ledger_root: Path, needle: str
) -> None:
    sleeper = f"import os; os.execv('/bin/sleep', ['sleep', '{needle}'])"
    seen: dict[str, list[str]] = {}

    async def program(command: SandboxCommand) -> ExecResult:
        assert command.home is not None
        entry = json.loads((command.home / "servers.json").read_text())["lab"]
        argv = [outside(command, word) for word in (entry["command"], *entry["args"])]
        process = await anyio.open_process(argv)
        await one_call(command)
        while not running(needle):
            await anyio.sleep(0.01)
        process.kill()
        await process.aclose()
        return OK

    async def verify(command: SandboxCommand) -> ExecResult:
        seen["then"] = [str(pid) for pid in running(needle)]
        seen["mounts"] = [mount.target for mount in command.mounts]
        return OK

    sandbox = FakeSandbox(program, verify)
    task = replace(make_task(), mcp_servers=(hosted("-c", sleeper),))
    record = await run_rollout(plan_of(task), replace(parts_of(ledger_root, sandbox), harness=Mounting()))
    assert record.outcome is Outcome.COMPLETED, record.detail
    harness, verifier = sandbox.commands
    assert [mount.target for mount in harness.mounts if "mcp" in mount.target] == [
        "/run/clawhpc/mcp/bridge.py",
        "/run/clawhpc/mcp/lab.sock",
    ]
    assert all(mount.source.parent == harness.home.parent for mount in harness.mounts if mount.target.endswith(".sock"))
    assert seen["then"] == []
    assert not any("mcp" in target for target in seen["mounts"])
    assert verifier.proxy_socket is None
