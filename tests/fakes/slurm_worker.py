"""A worker that has no parts: a real job on a real Slurm, real claims and real files, but it makes its rollouts up.

What it is to do stands in the names of its tasks: `exit-7-once` ends the process like that, unless it has been done.
Each record says in `detail` which job it comes from, on which node, with which GPUs.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from clawhpc.errors import HostError
from clawhpc.launch.job import WorkerJob
from clawhpc.paths import RunPaths
from clawhpc.records import GroupPlan, Limits
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import (
    claim_group,
    missing_samples,
    open_plans,
    publish_rollout,
    seal_group,
    unsealed_groups,
    write_atomic,
)
from clawhpc.worker.settings import READY_FILE, STOP_FILE, WorkerSettings, WorkerSpec
from tests.fakes.records import make_record

POLL_S = 0.1


class Told(BaseException):
    """It is to end."""


def raise_told(number: int, frame: FrameType | None) -> None:
    raise Told


@dataclass(frozen=True)
class StubWorker(WorkerJob):
    """In place of `WorkerJob`."""

    rollout_s: float = 0.0
    """What one rollout takes."""

    def _work(self) -> signal.Signals | None:
        signal.signal(signal.SIGTERM, raise_told)
        write_atomic(self._workers / self.worker_id / READY_FILE, b"")
        try:
            while not (self._workers / self.worker_id / STOP_FILE).exists():
                self._collect_all(RunPaths(Path(self.spec.run_root)))
                time.sleep(POLL_S)
        except Told:
            return signal.SIGTERM
        return None

    def _collect_all(self, paths: RunPaths) -> None:
        for plan in open_plans(paths):
            for group in unsealed_groups(paths, plan):
                if claim_group(paths, group.key, self.worker_id):
                    self._collect(paths, group)

    def _collect(self, paths: RunPaths, group: GroupPlan) -> None:
        self._misbehave(paths, group.key.task_id)
        for sample in missing_samples(paths, group):
            time.sleep(self.rollout_s)
            publish_rollout(paths, replace(make_record(group, sample), worker_id=self.worker_id, detail=where()))
        seal_group(paths, group)

    def _misbehave(self, paths: RunPaths, task_id: str) -> None:
        what, _, often = task_id.removeprefix("exit-7").removeprefix("give-up").partition("-")
        done = paths.workers / f"{task_id}.done"
        if task_id == what or (often == "once" and done.exists()):
            return
        done.touch()
        if task_id.startswith("exit-7"):
            os._exit(7)
        raise HostError("the engine has failed to start 3 times in a row")


@dataclass(frozen=True)
class SlowStub(StubWorker):
    """Time enough to kill something."""

    rollout_s: float = 0.5


def where() -> str:
    """Job, node, GPUs."""
    names = ("SLURM_JOB_ID", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "SLURM_RESTART_COUNT")
    return " ".join(os.environ.get(name, "-") for name in names)


def stub_spec(root: Path) -> WorkerSpec:
    """For a run in `root`."""
    return WorkerSpec(
        run_root=str(root),
        cache_dir=str(root / "cache"),
        scratch_root=None,
        worker=WorkerSettings(),
        engine=EngineSettings(),
        sandbox=SandboxSettings(),
        limits=Limits(),
        harnesses={},
    )
