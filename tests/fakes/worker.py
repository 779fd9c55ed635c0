"""A worker with a desk of no engine: what its tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from clawhpc.errors import ClawError, EngineError
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import Responder
from clawhpc.records import GroupPlan, Limits, StepPlan
from clawhpc.sandbox.by_image import Sandboxes
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import open_plans
from clawhpc.worker.run import Worker
from clawhpc.worker.settings import STOP_FILE, WorkerSettings, WorkerSpec
from tests.fakes.caller import policy
from tests.fakes.engine import FakeEngine
from tests.fakes.records import make_group
from tests.fakes.rollout import FakeHarness, FakeSandbox, one_call


@dataclass
class FakeDesk:
    """An engine that remembers which weights it was asked for."""

    engine: FakeEngine = field(default_factory=lambda: FakeEngine(lambda prompt: "fine"))
    engine_cpu_s: float = 1.5
    starts: list[int] = field(default_factory=list)
    """Policy steps, one for each call of `make_ready`."""
    max_starts: int = 100
    end: ClawError = field(default_factory=lambda: EngineError("it has died too often"))
    recovers: list[ClawError | None] = field(default_factory=list)
    """How it ends to look after the engine, from the first time on; well where nothing is said."""
    num_recovered: int = 0

    async def make_ready(self, plan: StepPlan) -> None:
        self.starts.append(plan.policy_step)
        if len(self.starts) > self.max_starts:
            raise self.end

    async def recover(self) -> None:
        self.num_recovered += 1
        if self.recovers and (error := self.recovers.pop(0)) is not None:
            raise error

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        return policy(self.engine)


def plan_of(*tasks: str, step: int = 0, num_samples: int = 2) -> StepPlan:
    groups = tuple(make_group(task, step=step, num_samples=num_samples) for task in tasks)
    return StepPlan(phase="train", step=step, policy_step=step, temperature=0.5, groups=groups)


def worker_of(
    tmp_path: Path, desk: FakeDesk, sandbox: FakeSandbox | Sandboxes | None = None, **settings: Any
) -> Worker:
    scratch = tmp_path / "s"
    scratch.mkdir(exist_ok=True)
    return Worker(
        worker_spec(tmp_path, **settings),
        "w0",
        sandboxes=sandbox if isinstance(sandbox, Sandboxes) else Sandboxes(sandbox or FakeSandbox(one_call)),
        harnesses={"pi": FakeHarness()},
        desk=desk,
        scratch=scratch,
        environment={"CLAWHPC_OWNER": "this worker"},
    )


def worker_spec(tmp_path: Path, **settings: Any) -> WorkerSpec:
    return WorkerSpec(
        run_root=str(tmp_path / "run"),
        cache_dir=str(tmp_path),
        scratch_root=None,
        worker=replace(WorkerSettings(concurrency=2, poll_s=0.01, max_attempts=1), **settings),
        engine=EngineSettings(),
        sandbox=SandboxSettings(),
        limits=Limits(deadline_s=60.0, reserve_s=30.0, settle_s=0.1),
        harnesses={},
    )


async def work_until(paths: RunPaths, worker: Worker, what: Callable[[], bool]) -> None:
    """Let the worker work until `what` is true, and then stop it as a campaign does."""
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.work)
            while not what():
                await anyio.sleep(0.01)
            stop = paths.workers / "w0" / STOP_FILE
            stop.parent.mkdir(parents=True, exist_ok=True)
            stop.touch()


async def work_through(paths: RunPaths, worker: Worker) -> None:
    await work_until(paths, worker, lambda: not open_plans(paths))
