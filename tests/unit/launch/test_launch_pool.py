"""What a full disk does to workers: they end all the same, and the error that is told is the true one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.harness.pi import PiSettings
from clawhpc.launch.pool import WorkerJob, WorkerPool
from clawhpc.launch.settings import LaunchSettings
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import Limits
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.worker.settings import STOP_FILE, WorkerSettings, WorkerSpec


def spec_of(tmp_path: Path, scratch: Path) -> WorkerSpec:
    """A worker whose harness is not installed."""
    return WorkerSpec(
        run_root=str(tmp_path / "run"),
        cache_dir=str(tmp_path / "cache"),
        scratch_root=str(scratch),
        worker=WorkerSettings(),
        engine=EngineSettings(),
        sandbox=SandboxSettings(),
        limits=Limits(),
        harnesses={"pi": PiSettings()},
    )


@dataclass
class Job:
    """A job of submitit on this machine, as the pool sees it."""

    process: subprocess.Popen[bytes]

    @property
    def job_id(self) -> str:
        return str(self.process.pid)

    def done(self) -> bool:
        return self.process.poll() is not None


@pytest.fixture
def jobs() -> Iterator[dict[str, Job]]:
    found = {f"w{index}": Job(subprocess.Popen(["sleep", "60"])) for index in range(2)}
    yield found
    for job in found.values():
        job.process.kill()
        job.process.wait()


def test_workers_that_cannot_be_asked_to_stop_are_ended(
    tmp_path: Path, ledger: Ledger, ledger_root: Path, jobs: dict[str, Job]
) -> None:
    spec = spec_of(tmp_path, ledger_root)
    pool = WorkerPool(LaunchSettings(), spec, ledger)
    pool._jobs = dict(jobs)
    workers = RunPaths(Path(spec.run_root)).workers
    workers.mkdir(parents=True, exist_ok=True)
    (workers / "w0").touch()  # nothing can be written below it
    pool.close(grace_s=0.0)
    assert (workers / "w1" / STOP_FILE).exists()
    assert all(job.done() for job in jobs.values())


def test_a_worker_that_cannot_note_why_it_gave_up_still_raises_it(tmp_path: Path, ledger_root: Path) -> None:
    spec = spec_of(tmp_path, ledger_root)
    Path(spec.run_root).mkdir()
    RunPaths(Path(spec.run_root)).workers.touch()
    with pytest.raises(UserError, match=r"install_harness\.sh pi"):
        WorkerJob(spec, "w0")()
