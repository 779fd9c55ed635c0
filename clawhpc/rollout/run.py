"""One rollout: boot → run → settle → verify → seal.

One wall-clock deadline stands around all of it (law 5); `Limits.reserve_s` of it is kept back from the harness, so that
a harness that times out is still verified. Whatever a part does, the result is a record with an `Outcome`; only
cancellation from outside (the worker is told to stop) leaves none, and then the same plan is collected again later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.errors import BoundaryError, EngineError, ProxyError, SandboxError, VerifierError, boundary, ungrouped
from clawhpc.harness.base import Harness
from clawhpc.mcp.host import HostServers, open_servers
from clawhpc.proxy.app import KEEP_ALIVE_S, open_session
from clawhpc.proxy.respond import Responder
from clawhpc.proxy.session import Session
from clawhpc.records import (
    TEARDOWN_S,
    ExecResult,
    GroupPlan,
    LaunchRequest,
    Limits,
    Outcome,
    RolloutRecord,
    TaskSpec,
    rollout_id,
)
from clawhpc.rollout.ending import check_engine, check_machine, ending, outcome_of
from clawhpc.rollout.folder import HOME, SOCKET, WORKSPACE, lay_out, rollout_folder
from clawhpc.rollout.trace import Trace
from clawhpc.sandbox.base import PROXY_URL, Mount, Sandbox, SandboxCommand
from clawhpc.tree.prune import prune_tree
from clawhpc.verify.judge import Judge
from clawhpc.verify.settings import ShapingSettings
from clawhpc.verify.verdict import verify


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What a worker lends to each of its rollouts."""

    sandbox: Sandbox
    harness: Harness
    responder: Responder
    scratch: Path
    """Node-local folder, with a short path."""
    limits: Limits
    model: str
    """The name under which harnesses ask for the policy."""
    context_window: int
    """Tokens."""
    max_output_tokens: int
    worker_id: str
    now: Callable[[], float]
    """Seconds since the epoch."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of each process that is started on the host: the ledger's, by which it is known."""
    keep_alive_s: float = KEEP_ALIVE_S
    """Between the events of a stream in which nothing is drawn yet."""
    judge: Judge | None = None
    """Of tasks with a rubric; None where there are none."""
    shaping: ShapingSettings = field(default_factory=ShapingSettings)
    strict_fields: bool = False
    """Requests with a field that their protocol's table does not list are refused."""


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """One sample of a group."""

    group: GroupPlan
    sample: int
    temperature: float

    @property
    def rollout_id(self) -> str:
        """Its one id."""
        return rollout_id(self.group.key, self.sample)

    @property
    def task(self) -> TaskSpec:
        """What is to be done."""
        return self.group.task

    @property
    def seed(self) -> int:
        """From which the seed of every call is derived."""
        return self.group.seed + self.sample


async def run_rollout(plan: RolloutPlan, parts: RolloutParts) -> RolloutRecord:
    """Run `plan` to its end. Always a record, unless cancelled from outside."""
    trace, started_at = Trace(), parts.now()
    deadline = anyio.current_time() + parts.limits.deadline_s
    try:
        async with rollout_folder(parts.scratch, trace) as folder:
            await play(plan, parts, folder, trace, deadline)
        outcome, detail = ending(trace)
    except BoundaryError as error:
        outcome, detail = outcome_of(error), str(error)
    return seal(plan, parts, trace, outcome, detail, started_at)


async def play(plan: RolloutPlan, parts: RolloutParts, folder: Path, trace: Trace, deadline: float) -> None:
    """Boot, run, settle and verify; what comes of it is in `trace`. Raises what the part that failed raised."""
    run_deadline = deadline - parts.limits.reserve_s
    for secret in plan.task.hidden_folders:
        parts.sandbox.check_hidden(Path(secret))
    with trace.phase("boot", SandboxError, run_deadline):
        await to_thread.run_sync(lay_out, plan.task, folder, abandon_on_cancel=True)
    async with open_session(
        responder=parts.responder,
        classify=parts.harness.classify,
        limits=parts.limits,
        seed=plan.seed,
        socket=folder / SOCKET,
        model=parts.model,
        keep_alive_s=parts.keep_alive_s,
        strict=parts.strict_fields,
        now=parts.now,
    ) as session:
        try:
            with trace.phase("run", SandboxError, deadline):
                run_deadline = min(run_deadline, anyio.current_time() + harness_s(plan.task, parts.limits))
                async with open_servers(
                    plan.task.mcp_servers,
                    folder=folder,
                    environment=parts.environment,
                    fail=session.fail_before_reply,
                    now=parts.now,
                ) as servers:
                    trace.mcp = servers.traffic
                    trace.exec_result = await run_harness(plan, parts, folder, session, servers, run_deadline)
            with trace.phase("settle", ProxyError, deadline):
                await session.settle(parts.limits.settle_s)
        finally:
            trace.calls, trace.overflow = session.calls(), session.overflow
            trace.limit, trace.limit_detail = session.limit, session.limit_detail
        if session.failure is not None:
            raise session.failure
    with trace.phase("settle", EngineError, deadline - TEARDOWN_S):
        await check_engine(trace, parts.responder)
    check_machine(trace, harness_s(plan.task, parts.limits))
    with trace.phase("verify", VerifierError, deadline):
        trace.verdict = await verify(
            plan.task,
            folder / WORKSPACE,
            trace.calls,
            sandbox=parts.sandbox,
            judge=parts.judge,
            shaping=parts.shaping,
            sandbox_id=f"{plan.rollout_id}-verify",
            timeout_s=max(1.0, deadline - TEARDOWN_S - anyio.current_time()),
        )


def harness_s(task: TaskSpec, limits: Limits) -> float:
    """How long its harness may run at most."""
    return limits.harness_s if task.run_s is None else min(limits.harness_s, task.run_s)


async def run_harness(
    plan: RolloutPlan, parts: RolloutParts, folder: Path, session: Session, servers: HostServers, run_deadline: float
) -> ExecResult | None:
    """Run the harness until it ends or its time is up; None when the session said that it need not run on."""
    command = harness_command(plan, parts, folder, PROXY_URL + session.base_path, servers)
    result = None
    with ungrouped():
        async with anyio.create_task_group() as tasks:

            async def stop_early() -> None:
                await session.wait_stopped()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop_early)
            result = await parts.sandbox.run(command, timeout_s=max(0.0, run_deadline - anyio.current_time()))
            tasks.cancel_scope.cancel()
    return result


def harness_command(
    plan: RolloutPlan, parts: RolloutParts, folder: Path, base_url: str, servers: HostServers
) -> SandboxCommand:
    """What the sandbox is to run: the harness on the workspace, with its own HOME and its own sockets."""
    task = plan.task
    request = LaunchRequest(
        instruction=task.instruction,
        base_url=base_url,
        workspace_mount=task.workspace_mount,
        model=parts.model,
        context_window=parts.context_window,
        max_output_tokens=parts.max_output_tokens,
        python=parts.sandbox.python,
        mcp_servers=servers.seen_inside(task.mcp_servers, parts.sandbox.python),
    )
    launch = parts.harness.launch_plan(request)
    for name, content in launch.files.items():
        path = folder / HOME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    installs = tuple(Mount(source=Path(source), target=target) for source, target in launch.read_only.items())
    return SandboxCommand(
        sandbox_id=plan.rollout_id,
        argv=launch.argv,
        env=task.env | launch.env,
        cwd=task.workspace_mount,
        mounts=(
            Mount(source=folder / WORKSPACE, target=task.workspace_mount, writable=True),
            *installs,
            *servers.mounts(task),
        ),
        home=folder / HOME,
        proxy_socket=folder / SOCKET,
    )


def seal(
    plan: RolloutPlan, parts: RolloutParts, trace: Trace, outcome: Outcome, detail: str, started_at: float
) -> RolloutRecord:
    """The record. Its tree is built here once, so that a rollout whose calls make no tree is known as such (law 2)."""
    verdict, dropped = trace.verdict, {}
    try:
        with boundary(ProxyError, "its calls make no tree"):
            if all(call.tokens is not None for call in trace.calls if call.reply is not None):
                pruned = prune_tree(plan.rollout_id, trace.calls, max_live_leaves=parts.limits.max_live_leaves)
                dropped = pruned.dropped_leaves
                if pruned.over_branched and verdict is not None:
                    outcome, detail = Outcome.OVER_BRANCHED, f"live leaves per conversation: {pruned.live_leaves}"
    except ProxyError as error:
        outcome, detail, verdict = Outcome.PROXY_FAILED, str(error), None
    return RolloutRecord(
        rollout_id=plan.rollout_id,
        key=plan.group.key,
        sample=plan.sample,
        seed=plan.seed,
        temperature=plan.temperature,
        instruction=plan.task.instruction,
        calls=trace.calls,
        outcome=outcome,
        detail=detail,
        verdict=verdict,
        exec_result=trace.exec_result,
        timings=trace.timings(started_at),
        worker_id=parts.worker_id,
        dropped_leaves=dropped,
        mcp_calls=trace.mcp.calls() if trace.mcp is not None else (),
        mcp_counts=dict(trace.mcp.counts) if trace.mcp is not None else {},
    )
