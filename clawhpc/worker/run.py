"""The life of one worker.

It starts its parts once, then takes plans from the store in order. A plan is a barrier: the engine holds the weights
that it names before its first rollout starts, and its last one has ended before the next plan is looked at. Learner
and workers meet in files only, so waiting for a plan is looking for it again and again; nothing else here polls.

A rollout that the machine fails is run again, as if it had never been, up to a bound; then the failure is its record. A
worker on whose host nothing can be done records no failures: it gives back what it has claimed, and ends.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.errors import EngineError, HostError, SandboxError, UserError, ungrouped
from clawhpc.harness.base import Harness
from clawhpc.harness.registry import make_harness
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import (
    MACHINE_OUTCOMES,
    EngineTime,
    FailedAttempt,
    GroupPlan,
    Outcome,
    RolloutRecord,
    StepPlan,
    TaskImage,
    WorkerUsage,
)
from clawhpc.rollout.run import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.base import Sandbox
from clawhpc.sandbox.by_image import Sandboxes, check_seen, open_images
from clawhpc.sandbox.open import check_sandbox, open_sandbox
from clawhpc.store import (
    claim_group,
    give_back,
    missing_samples,
    open_plans,
    publish_rollout,
    publish_usage,
    seal_group,
    unsealed_groups,
    write_atomic,
)
from clawhpc.verify.judge import Judge, open_judge
from clawhpc.verify.settings import judge_keys
from clawhpc.worker.desk import Desk
from clawhpc.worker.endpoint_desk import open_desk
from clawhpc.worker.settings import READY_FILE, STOP_FILE, WorkerSpec

log = logging.getLogger(__name__)

TOLD_S = 1.0
"""For a signal to reach us that has already ended something of ours."""
MODEL_NAME = "clawhpc-policy"
"""What harnesses call the policy."""


def run_worker(spec: WorkerSpec, worker_id: str, job: str = "") -> signal.Signals | None:
    """Work until told to stop (the stop file, SIGTERM, SIGINT), or until idle. Nothing is left afterwards.

    Returns the signal that it was told by. `job`: of Slurm, to which what it starts belongs.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it encodes one text at a time: a pool of threads would only spin
    with Ledger.open(Path(spec.scratch_root) if spec.scratch_root else None, job=job) as ledger:
        return anyio.run(live, spec, worker_id, ledger)


async def live(spec: WorkerSpec, worker_id: str, ledger: Ledger) -> signal.Signals | None:
    """Start the parts, work, stop the parts. Raises UserError, or HostError where they do not start here."""
    paths, cache_dir = RunPaths(Path(spec.run_root)), Path(spec.cache_dir)
    harnesses = {name: make_harness(name, one, cache_dir / "harness") for name, one in spec.harnesses.items()}
    for harness in harnesses.values():
        harness.check_install()
    keys = judge_keys(spec.verify.judge, os.environ)
    told_by: list[signal.Signals] = []
    gc.freeze()  # what is imported stays: each full collection of it would hold up every rollout for 80 ms
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_when_told, worker_id, tasks.cancel_scope, told_by)
            sandbox = await open_sandbox_here(spec, ledger)
            for folder in (Path(spec.run_root), cache_dir):
                sandbox.check_hidden(folder)
            async with (
                open_desk(spec, paths, worker_id, ledger, tasks) as desk,
                open_judge(spec.verify.judge, keys) as judge,
            ):
                worker = Worker(
                    spec,
                    worker_id,
                    sandboxes=open_images(sandbox, spec.sandbox, ledger),
                    harnesses=harnesses,
                    desk=desk,
                    scratch=ledger.scratch,
                    environment=ledger.environment,
                    judge=judge,
                )
                await worker.work()
            tasks.cancel_scope.cancel()
    return told_by[0] if told_by else None


async def open_sandbox_here(spec: WorkerSpec, ledger: Ledger) -> Sandbox:
    """See `open_sandbox`. Where we are told to end meanwhile, that comes first: whoever ends a job signals all of its
    processes, also those that try whether a sandbox starts, and that says nothing of the host.
    """
    try:
        return await open_sandbox(spec.sandbox, ledger=ledger, cache_dir=Path(spec.cache_dir))
    except HostError:
        await anyio.sleep(TOLD_S)
        raise


async def stop_when_told(worker_id: str, scope: anyio.CancelScope, told_by: list[signal.Signals]) -> None:
    """Cancel everything at the first SIGTERM or SIGINT, and note which it was in `told_by`."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("worker %s: %s, ending", worker_id, number.name)
            told_by.append(number)
            scope.cancel()


class Worker:
    """Collects planned groups with the parts that it is given."""

    def __init__(
        self,
        spec: WorkerSpec,
        worker_id: str,
        *,
        sandboxes: Sandboxes,
        harnesses: dict[str, Harness],
        desk: Desk,
        scratch: Path,
        environment: Mapping[str, str],
        judge: Judge | None = None,
    ) -> None:
        """`judge`: None where no task has a rubric."""
        self._spec, self._id = spec, worker_id
        self._sandboxes, self._harnesses, self._desk = sandboxes, harnesses, desk
        self._scratch, self._environment, self._judge = scratch, environment, judge
        self._paths = RunPaths(Path(spec.run_root))
        self._slots = anyio.Semaphore(spec.worker.concurrency)
        self._done: set[Path] = set()
        self._engine_by_plan: defaultdict[str, EngineTime] = defaultdict(EngineTime)

    async def work(self) -> None:
        """Take plans, in order, until the stop file is there or nothing has come for too long.

        However this ends, what is claimed and not whole is free for others at once.
        """
        try:
            await self._work()
        finally:
            self._give_back()

    async def _work(self) -> None:
        stop, idle_since = self._paths.workers / self._id / STOP_FILE, anyio.current_time()
        while not stop.exists() and anyio.current_time() - idle_since < 60 * self._spec.worker.idle_min:
            worked = False
            for plan in await to_thread.run_sync(open_plans, self._paths, self._done):
                began = EngineTime(wall_s=anyio.current_time(), cpu_s=self._desk.engine_cpu_s)
                if self._spec.takes(plan) and await self._collect(plan):
                    worked = True
                    await self._note_usage(plan, began)
            if worked:
                idle_since = anyio.current_time()
            else:
                await anyio.sleep(self._spec.worker.poll_s)

    async def _note_usage(self, plan: StepPlan, began: EngineTime) -> None:
        """Publish what the worker has cost so far, and of it the engine for `plan` since `began`."""
        wall_s, cpu_s = anyio.current_time() - began.wall_s, self._desk.engine_cpu_s - began.cpu_s
        self._engine_by_plan[plan.name] += EngineTime(wall_s=wall_s, cpu_s=max(0.0, cpu_s))
        usage = WorkerUsage(
            own_cpu_s=time.process_time(),
            engine_cpu_s=self._desk.engine_cpu_s,
            engine_by_plan=dict(self._engine_by_plan),
        )
        await to_thread.run_sync(publish_usage, self._paths, self._id, usage)

    def _give_back(self) -> None:
        """Where the store cannot be read or written, the campaign frees the claims of the dead."""
        with suppress(OSError, UserError):
            plans = open_plans(self._paths, self._done)
            if given := sum(give_back(self._paths, plan, self._id) for plan in plans):
                log.warning("worker %s on %s gives %d groups back", self._id, os.uname().nodename, given)

    async def _collect(self, plan: StepPlan) -> bool:
        """Collect the groups of `plan` that nobody else has; whether there was one.

        Before each rollout the engine is looked at. One that has died is started again; the rollouts under way wait.
        The store is asked in threads: where its file system is slow, the proxy goes on answering.
        """
        claimed = 0
        async with anyio.create_task_group() as tasks:
            for group in await to_thread.run_sync(unsealed_groups, self._paths, plan):
                if not await to_thread.run_sync(claim_group, self._paths, group.key, self._id):
                    continue
                claimed += 1
                await self._make_ready(plan)
                for sample in await to_thread.run_sync(missing_samples, self._paths, group):
                    await self._slots.acquire()
                    await self._make_ready(plan)
                    tasks.start_soon(self._collect_sample, plan, group, sample)
                await to_thread.run_sync(self._seal_if_whole, group)
        return claimed > 0

    async def _make_ready(self, plan: StepPlan) -> None:
        await self._desk.make_ready(plan)
        ready = self._paths.workers / self._id / READY_FILE
        if not ready.exists():
            await to_thread.run_sync(write_atomic, ready, b"")

    async def _collect_sample(self, plan: StepPlan, group: GroupPlan, sample: int) -> None:
        """Run and publish one rollout; the last one of a group seals it."""
        try:
            record = await self._run(plan, group, sample)
            if record.unlisted:
                log.info("rollout %s: request fields that no table lists: %s", record.rollout_id, dict(record.unlisted))
            await to_thread.run_sync(publish_rollout, self._paths, record)
            await to_thread.run_sync(self._seal_if_whole, group)
        finally:
            self._slots.release()

    async def _run(self, plan: StepPlan, group: GroupPlan, sample: int) -> RolloutRecord:
        """The rollout's last attempt, which knows of those before. HostError in place of a failure that is the host's.

        Each attempt has a folder, a session and a deadline of its own, and the seed of the first: another one would
        favour what does not make the machine fail.
        """
        rollout = RolloutPlan(group=group, sample=sample, temperature=plan.temperature)
        failed: list[FailedAttempt] = []
        while True:
            record = await run_rollout(rollout, await self._parts(plan, group))
            log.info("rollout %s: %s %s", record.rollout_id, record.outcome, record.detail)
            if record.outcome not in MACHINE_OUTCOMES:
                break
            await self._check_engine(record)
            if len(failed) + 1 >= self._spec.worker.max_attempts:
                await self._check_sandbox(record, group.task.image)
                break
            seconds = record.timings.wall_s
            failed.append(FailedAttempt(outcome=record.outcome, detail=record.detail, seconds=seconds))
            await self._make_ready(plan)
        return replace(record, failed_attempts=tuple(failed))

    async def _check_engine(self, record: RolloutRecord) -> None:
        """One that hangs is started again, which nobody else would do: it lives. HostError where none starts here."""
        if record.outcome is Outcome.ENGINE_FAILED:
            with suppress(EngineError):  # it has died too often, which ends the worker before its next rollout
                await self._desk.recover()

    async def _check_sandbox(self, record: RolloutRecord, image: TaskImage | None) -> None:
        """Raise HostError where no sandbox starts any more: every rollout would fail here, one after the other.

        One that stands on a task's own image, and does not start, is the failure of that task, if the others' are seen.
        """
        if record.outcome is Outcome.SANDBOX_FAILED:
            if image is not None:
                await to_thread.run_sync(check_seen, image)
            try:
                await check_sandbox(self._sandboxes.own)
            except SandboxError as error:
                raise HostError(f"sandboxes no longer start: {error}") from error

    def _seal_if_whole(self, group: GroupPlan) -> None:
        """Also for a group whose last sample was published by a worker that died before it could seal it."""
        if not missing_samples(self._paths, group):
            seal_group(self._paths, group)

    async def _parts(self, plan: StepPlan, group: GroupPlan) -> RolloutParts:
        return RolloutParts(
            sandbox=await self._sandboxes.of(group.task.image),
            harness=self._harnesses[group.key.harness],
            responder=self._desk.responder(plan, group),
            scratch=self._scratch,
            environment=self._environment,
            limits=self._spec.limits,
            model=MODEL_NAME,
            context_window=self._spec.engine.max_model_len,
            max_output_tokens=self._spec.worker.max_output_tokens,
            worker_id=self._id,
            now=time.time,
            judge=self._judge,
            shaping=self._spec.verify.shaping,
            strict_fields=self._spec.worker.strict_fields,
        )
