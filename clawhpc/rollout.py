"""One rollout: boot → run → settle → verify → seal.

One wall-clock deadline stands around all of it (law 5); `Limits.reserve_s` of it is kept back from the harness, so that
a harness that times out is still verified. Whatever a part does, the result is a record with an `Outcome`; only
cancellation from outside (the worker is told to stop) leaves none, and then the same plan is collected again later.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from anyio import from_thread, to_thread

from clawhpc.errors import BoundaryError, EngineError, ProxyError, SandboxError, VerifierError, boundary, ungrouped
from clawhpc.harness.base import Harness
from clawhpc.ledger import discard
from clawhpc.mcp.host import HostServers, open_servers
from clawhpc.mcp.traffic import Traffic
from clawhpc.proxy.app import KEEP_ALIVE_S, open_session
from clawhpc.proxy.respond import Responder
from clawhpc.proxy.session import CANCELLED, Session
from clawhpc.records import (
    TEARDOWN_S,
    CallRecord,
    ExecResult,
    GroupPlan,
    LaunchRequest,
    Limits,
    Outcome,
    RolloutRecord,
    TaskSpec,
    Timings,
    Verdict,
    rollout_id,
)
from clawhpc.sandbox.base import PROXY_URL, Mount, Sandbox, SandboxCommand
from clawhpc.tree.prune import prune_tree
from clawhpc.verify.judge import Judge
from clawhpc.verify.settings import ShapingSettings
from clawhpc.verify.verdict import verify
from clawhpc.wire.base import ContextOverflow

OUTCOME_OF: dict[type[BoundaryError], Outcome] = {
    SandboxError: Outcome.SANDBOX_FAILED,
    EngineError: Outcome.ENGINE_FAILED,
    ProxyError: Outcome.PROXY_FAILED,
    VerifierError: Outcome.VERIFIER_FAILED,
}
"""Which part of the machine failed -> how the rollout is recorded."""
ENGINE_CHECK_S = 5.0
"""An engine that draws at all answers somebody within this time, or draws one more token."""
FIRST_REPLY_SHARE = 0.5
"""Of the time that a harness has: a first reply that was drawn for longer has no end. A later one began late."""
WORKSPACE, HOME, SOCKET = "workspace", "home", "p"
"""What lies in a rollout's folder. The socket's name is short: the path of a unix socket has 107 bytes at most."""


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


@dataclass
class Trace:
    """What is known so far about a rollout that is still running."""

    calls: tuple[CallRecord, ...] = ()
    limit: str | None = None
    limit_detail: str = ""
    overflow: ContextOverflow | None = None
    """The last prompt that did not fit the window."""
    exec_result: ExecResult | None = None
    verdict: Verdict | None = None
    mcp: Traffic | None = None
    """Of its MCP servers on the host."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> wall seconds."""

    @contextmanager
    def phase(self, name: str, kind: type[BoundaryError], deadline: float) -> Iterator[None]:
        """Time one phase, bound it by `deadline`, and classify what escapes from it as `kind`."""
        start = anyio.current_time()
        try:
            with boundary(kind, name), anyio.fail_after(max(0.0, deadline - start)):
                yield
        except kind as error:
            if isinstance(error.__cause__, TimeoutError) and anyio.current_time() >= deadline:
                raise kind(f"{name}: the deadline of the rollout passed") from error
            raise
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + anyio.current_time() - start


async def run_rollout(plan: RolloutPlan, parts: RolloutParts) -> RolloutRecord:
    """Run `plan` to its end. Always a record, unless cancelled from outside."""
    trace, started_at = Trace(), parts.now()
    deadline = anyio.current_time() + parts.limits.deadline_s
    try:
        async with rollout_folder(parts.scratch, trace) as folder:
            await play(plan, parts, folder, trace, deadline)
        outcome, detail = ending(trace)
    except BoundaryError as error:
        outcome, detail = OUTCOME_OF[type(error)], str(error)
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
    most_s = limits.deadline_s - limits.reserve_s
    return most_s if task.run_s is None else min(most_s, task.run_s)


@asynccontextmanager
async def rollout_folder(scratch: Path, trace: Trace) -> AsyncIterator[Path]:
    """A folder of the rollout's own, gone afterwards whatever happened in it, cancellation included."""
    with boundary(SandboxError, "boot"):
        folder = Path(await anyio.mkdtemp(prefix="r", dir=str(scratch)))
    try:
        yield folder
    finally:
        start = anyio.current_time()
        await discard(folder, within_s=TEARDOWN_S)
        trace.seconds["teardown"] = anyio.current_time() - start


def lay_out(task: TaskSpec, folder: Path) -> None:
    """The workspace as the task begins with it, and an empty HOME."""
    (folder / HOME).mkdir()
    inputs = folder / WORKSPACE / task.input_subdir
    inputs.mkdir(parents=True)
    if task.input_dir is not None:
        shutil.copytree(task.input_dir, inputs, symlinks=True, dirs_exist_ok=True, copy_function=copy_file)


def copy_file(source: str, target: str) -> None:
    """As `copytree` does it; nothing more is copied once the time for booting is up."""
    from_thread.check_cancelled()
    shutil.copy2(source, target)


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


async def check_engine(trace: Trace, responder: Responder) -> None:
    """Raise EngineError where the time ran out that the engine took: it hangs, or was lost on the way.

    Where it draws, calls that were left without an answer were long: a policy that does not come to an end has its
    timeout, and learns from it.
    """
    incidents = [incident for call in trace.calls for incident in call.incidents]
    if incidents and trace.exec_result is not None and trace.exec_result.timed_out:
        raise EngineError(f"the harness ran out of time, some of which the engine took: {'; '.join(incidents)[:500]}")
    if cancelled_calls(trace):
        await responder.check_drawing(within_s=ENGINE_CHECK_S)


def cancelled_calls(trace: Trace) -> list[CallRecord]:
    """Those that were still open when the harness had ended."""
    return [call for call in trace.calls if call.failure == CANCELLED]


def check_machine(trace: Trace, most_s: float) -> None:
    """Raise where no call was answered and that is not the policy's doing: its reward would be a lie.

    `most_s`: that the harness had. EngineError for a window in which not even the first prompt fits, SandboxError for a
    harness that ended before, or whose requests were all refused. A first reply that was drawn until the time was up is
    the policy's doing.
    """
    if any(call.reply is not None for call in trace.calls):
        return
    if trace.overflow is not None:
        raise EngineError(f"engine.max_model_len is too small for the first prompt of the harness: {trace.overflow}")
    result, endless_s = trace.exec_result, FIRST_REPLY_SHARE * most_s
    endless = any(call.duration_s > endless_s for call in cancelled_calls(trace))
    if endless and (result is None or result.timed_out):
        return
    if result is None:
        raise SandboxError(f"the harness sent requests of which none was answered: {trace.limit_detail}")
    ended = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
    ended = f"was ended ({result.exceeded})" if result.exceeded else ended
    reason = "; ".join(call.failure for call in trace.calls) or result.stderr_tail or result.stdout_tail
    raise SandboxError(f"the harness {ended} before a model call was answered: {reason.strip()[-500:]}")


def ending(trace: Trace) -> tuple[Outcome, str]:
    """How a rollout ended in which every part did its work, and why, for a person."""
    if trace.limit is not None:
        return Outcome.LIMIT, trace.limit_detail
    result = trace.exec_result
    assert result is not None, "without a limit or a failure the harness has run to its end"
    if result.exceeded:
        return Outcome.LIMIT, result.exceeded
    if result.timed_out:
        return Outcome.TIMEOUT, f"the harness was stopped after {result.wall_s:.0f} s"
    if result.exit_code != 0:
        return Outcome.HARNESS_EXIT, f"exit code {result.exit_code}: {result.stderr_tail.strip()[-500:]}"
    return Outcome.COMPLETED, ""


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
        timings=timings(trace, started_at),
        worker_id=parts.worker_id,
        dropped_leaves=dropped,
        mcp_calls=trace.mcp.calls() if trace.mcp is not None else (),
        mcp_counts=dict(trace.mcp.counts) if trace.mcp is not None else {},
    )


def timings(trace: Trace, started_at: float) -> Timings:
    """Seconds of each phase that was reached."""
    return Timings(
        started_at=started_at,
        **{f"{name}_s": trace.seconds.get(name, 0.0) for name in ("boot", "run", "settle", "verify", "teardown")},
        harness_cpu_s=trace.exec_result.cpu_s if trace.exec_result else 0.0,
    )
