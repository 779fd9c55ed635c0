"""A sandbox and a harness for tests of what runs rollouts: the programs in them are Python, the proxy is real."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import anyio
import httpx2

from clawhpc.errors import UserError
from clawhpc.harness.base import WireName
from clawhpc.proxy.respond import Responder
from clawhpc.records import (
    CallRole,
    Conversation,
    ExecResult,
    LaunchPlan,
    LaunchRequest,
    Limits,
    RolloutRecord,
    TaskSpec,
)
from clawhpc.rollout.run import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.base import PROXY_URL, SandboxCommand
from tests.fakes.caller import policy
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.records import make_group, make_task

LIMITS = Limits(deadline_s=30.0, reserve_s=10.0, settle_s=0.1)
OK = ExecResult(exit_code=0, stdout_tail="1\n", stderr_tail="", wall_s=0.1, cpu_s=0.05, timed_out=False)

Program = Callable[[SandboxCommand], Awaitable[ExecResult]]


async def succeed(command: SandboxCommand) -> ExecResult:
    return OK


async def hang(command: SandboxCommand) -> ExecResult:
    await anyio.sleep_forever()
    return OK


@dataclass
class FakeSandbox:
    """Runs Python in place of the harness and of the verifier; a program over its time ends as a real one does."""

    harness: Program
    verifier: Program = succeed
    commands: list[SandboxCommand] = field(default_factory=list)
    timeouts_s: list[float] = field(default_factory=list)
    """That each of them had."""
    hidden: list[Path] = field(default_factory=list)
    """What it was asked about."""
    name: str = "fake"
    python: str = sys.executable

    async def run(self, command: SandboxCommand, *, timeout_s: float) -> ExecResult:
        self.commands.append(command)
        self.timeouts_s.append(timeout_s)
        with anyio.move_on_after(timeout_s):
            return await (self.verifier if command.proxy_socket is None else self.harness)(command)
        return replace(OK, exit_code=124, timed_out=True)

    def check_hidden(self, path: Path) -> None:
        self.hidden.append(path)


@dataclass(frozen=True)
class FakeHarness:
    """Its program is the fake sandbox's; it has one file and one read-only folder."""

    name: ClassVar[str] = "pi"
    protocol: ClassVar[WireName] = "anthropic"
    version: ClassVar[str] = "1"
    install_dir: Path = Path("/nowhere")

    def check_install(self) -> None:
        raise UserError("not installed")

    def launch_plan(self, request: LaunchRequest) -> LaunchPlan:
        return LaunchPlan(
            argv=("/opt/agent", request.instruction),
            env={"BASE_URL": request.base_url},
            files={".config/agent.json": request.model},
            read_only={str(self.install_dir): "/opt"},
        )

    def classify(self, headers: Mapping[str, str], conversation: Conversation) -> tuple[CallRole, dict[str, str]]:
        return CallRole.MAIN, {}


async def ask(command: SandboxCommand, *words: str, **fields: object) -> int:
    """One Messages call of a harness, over its socket; the status."""
    url = command.env["BASE_URL"].replace(PROXY_URL, "http://proxy")
    messages = [{"role": "user", "content": word} for word in words]
    body = {"model": "policy", "max_tokens": 20, "messages": messages, **fields}
    async with httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(command.proxy_socket))) as client:
        return (await client.post(f"{url}/v1/messages", json=body)).status_code


async def one_call(command: SandboxCommand) -> ExecResult:
    assert await ask(command, "hello") == 200
    return OK


def parts_of(
    tmp_path: Path,
    sandbox: FakeSandbox,
    responder: Responder | None = None,
    *,
    strict_fields: bool = False,
    **limits: float,
) -> RolloutParts:
    return RolloutParts(
        sandbox=sandbox,
        harness=FakeHarness(),
        responder=responder or policy(FakeEngine(replies("one", "two", "three"))),
        scratch=tmp_path,
        limits=replace(LIMITS, **limits),
        model="policy",
        context_window=1000,
        max_output_tokens=20,
        worker_id="w0",
        now=lambda: 1_790_000_000.0,
        strict_fields=strict_fields,
    )


def plan_of(task: TaskSpec | None = None) -> RolloutPlan:
    return RolloutPlan(group=make_group(task=task or make_task()), sample=1, temperature=0.7)


async def roll(
    tmp_path: Path, sandbox: FakeSandbox, responder: Responder | None = None, **limits: float
) -> RolloutRecord:
    """One rollout, which leaves nothing in the scratch folder."""
    with anyio.fail_after(60):
        record = await run_rollout(plan_of(), parts_of(tmp_path, sandbox, responder, **limits))
    assert list(tmp_path.iterdir()) == []
    return record


def workspace_of(command: SandboxCommand) -> Path:
    """The folder of the host that `command` may write."""
    return next(mount.source for mount in command.mounts if mount.writable)
