"""The life of one worker.

It starts its parts once, then takes plans from the store in order. A plan is a barrier: the engine holds the weights
that it names before its first rollout starts, and its last one has ended before the next plan is looked at. Learner
and workers meet in files only, so waiting for a plan is looking for it again and again; nothing else here polls.
"""

from __future__ import annotations

import logging
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.errors import ungrouped
from clawhpc.harness.base import Harness
from clawhpc.harness.registry import make_harness
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import Responder
from clawhpc.records import GroupPlan, StepPlan, WorkerUsage
from clawhpc.rollout import RolloutParts, RolloutPlan, run_rollout
from clawhpc.sandbox.base import Sandbox
from clawhpc.sandbox.open import open_sandbox
from clawhpc.store import (
    claim_group,
    missing_samples,
    open_plans,
    publish_rollout,
    publish_usage,
    seal_group,
    unsealed_groups,
)
from clawhpc.worker.desk import Desk
from clawhpc.worker.settings import STOP_FILE, WorkerSpec

log = logging.getLogger(__name__)

MODEL_NAME = "clawhpc-policy"
"""What harnesses call the policy."""


def run_worker(spec: WorkerSpec, worker_id: str) -> None:
    """Work until told to stop (the stop file, SIGTERM, SIGINT), or until idle. Nothing is left afterwards."""
    with Ledger.open(Path(spec.scratch_root) if spec.scratch_root else None) as ledger:
        anyio.run(Worker(spec, worker_id, ledger).run)


class Worker:
    """The life of one worker."""

    def __init__(self, spec: WorkerSpec, worker_id: str, ledger: Ledger) -> None:
        self._spec = spec
        self._id = worker_id
        self._ledger = ledger
        self._paths = RunPaths(Path(spec.run_root))
        self._slots = anyio.Semaphore(spec.worker.concurrency)
        self._harnesses = {
            name: make_harness(name, settings, Path(spec.cache_dir) / "harness")
            for name, settings in spec.harnesses.items()
        }

    async def run(self) -> None:
        """Start the parts, work, stop the parts. Raises UserError or EngineError where they do not start."""
        for harness in self._harnesses.values():
            harness.check_install()
        with ungrouped():
            async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
                tasks.start_soon(self._stop_when_told, tasks.cancel_scope)
                cache_dir = Path(self._spec.cache_dir)
                sandbox = await open_sandbox(self._spec.sandbox, ledger=self._ledger, cache_dir=cache_dir)
                await self._work(sandbox, Desk(self._spec, self._paths, self._id, self._ledger, stack))
                tasks.cancel_scope.cancel()

    async def _stop_when_told(self, scope: anyio.CancelScope) -> None:
        """Cancel everything at the first SIGTERM or SIGINT."""
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                log.info("worker %s: %s, ending", self._id, signal.Signals(number).name)
                scope.cancel()

    async def _work(self, sandbox: Sandbox, desk: Desk) -> None:
        """Take plans, in order, until the stop file is there or nothing has come for too long."""
        stop, idle_since = self._paths.workers / self._id / STOP_FILE, anyio.current_time()
        while not stop.exists() and anyio.current_time() - idle_since < 60 * self._spec.worker.idle_min:
            worked = False
            for plan in await to_thread.run_sync(open_plans, self._paths):
                worked |= await self._collect(plan, sandbox, desk)
            if worked:
                usage = WorkerUsage(own_cpu_s=time.process_time(), engine_cpu_s=desk.engine_cpu_s)
                publish_usage(self._paths, self._id, usage)
                idle_since = anyio.current_time()
            else:
                await anyio.sleep(self._spec.worker.poll_s)

    async def _collect(self, plan: StepPlan, sandbox: Sandbox, desk: Desk) -> bool:
        """Collect the groups of `plan` that nobody else has; whether there was one."""
        claimed = 0
        async with anyio.create_task_group() as tasks:
            for group in unsealed_groups(self._paths, plan):
                if desk.broken or not claim_group(self._paths, group.key, self._id):
                    continue
                if not claimed:
                    await desk.make_ready(plan)
                claimed += 1
                for sample in missing_samples(self._paths, group):
                    await self._slots.acquire()
                    tasks.start_soon(self._collect_sample, plan, group, sample, sandbox, desk)
                self._seal_if_whole(group)
        return claimed > 0

    async def _collect_sample(
        self, plan: StepPlan, group: GroupPlan, sample: int, sandbox: Sandbox, desk: Desk
    ) -> None:
        """Run and publish one rollout; the last one of a group seals it."""
        try:
            parts = self._parts(self._harnesses[group.key.harness], sandbox, desk.responder(plan, group))
            record = await run_rollout(RolloutPlan(group=group, sample=sample), parts)
            if record.detail:
                log.info("rollout %s: %s: %s", record.rollout_id, record.outcome, record.detail)
            publish_rollout(self._paths, record)
            self._seal_if_whole(group)
        finally:
            self._slots.release()

    def _seal_if_whole(self, group: GroupPlan) -> None:
        """Also for a group whose last sample was published by a worker that died before it could seal it."""
        if not missing_samples(self._paths, group):
            seal_group(self._paths, group)

    def _parts(self, harness: Harness, sandbox: Sandbox, responder: Responder) -> RolloutParts:
        return RolloutParts(
            sandbox=sandbox,
            harness=harness,
            responder=responder,
            scratch=self._ledger.scratch,
            limits=self._spec.limits,
            model=MODEL_NAME,
            context_window=self._spec.engine.max_model_len,
            max_output_tokens=self._spec.worker.max_output_tokens,
            worker_id=self._id,
            now=time.time,
        )
