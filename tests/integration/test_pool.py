"""Workers as jobs of a real submitit on this machine: who dies is replaced, who cannot live says why, none is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import LaunchError, UserError
from clawhpc.harness.pi import PiSettings
from clawhpc.launch.pool import WorkerPool
from clawhpc.launch.settings import LaunchSettings
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import Limits, StepPlan
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import publish_plan, read_step, write_atomic
from clawhpc.worker.settings import READY_FILE, WorkerSettings, WorkerSpec
from tests.fakes.records import make_group
from tests.fakes.slurm_worker import StubWorker, stub_spec
from tests.sandbox_parts import running

WAIT_S = 120.0
"""For a worker to start on a busy machine."""


def spec_of(tmp_path: Path, scratch: Path, cache_dir: Path, *, harness: bool = False) -> WorkerSpec:
    """A worker that waits for plans; with `harness`, for one that may not be installed."""
    return WorkerSpec(
        run_root=str(tmp_path / "run"),
        cache_dir=str(cache_dir),
        scratch_root=str(scratch),
        worker=WorkerSettings(),
        engine=EngineSettings(),
        sandbox=SandboxSettings(kind="bubblewrap"),
        limits=Limits(),
        harnesses={"pi": PiSettings()} if harness else {},
    )


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def worker_processes(tmp_path: Path) -> list[int]:
    """The processes in which the workers of this test run, or start."""
    return running(f"submitit.core._submit {tmp_path}")


@pytest.mark.sandbox
def test_a_worker_that_is_killed_is_replaced_and_none_is_left(
    tmp_path: Path, ledger: Ledger, ledger_root: Path, cache_dir: Path
) -> None:
    with WorkerPool(LaunchSettings(), spec_of(tmp_path, ledger_root, cache_dir), ledger) as pool:
        (first,) = pool.check()
        until(lambda: bool(worker_processes(tmp_path)))
        write_atomic(tmp_path / "run/workers" / first / READY_FILE, b"")  # else it is taken for one that cannot start
        for pid in worker_processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        until(lambda: pool.check() != frozenset({first}))
        (second,) = pool.check()
        assert second != first
    assert worker_processes(tmp_path) == []


@pytest.mark.sandbox
def test_a_first_worker_that_dies_ends_the_campaign_with_the_log_to_read(
    tmp_path: Path, ledger: Ledger, ledger_root: Path, cache_dir: Path
) -> None:
    with WorkerPool(LaunchSettings(), spec_of(tmp_path, ledger_root, cache_dir), ledger) as pool:
        until(lambda: bool(worker_processes(tmp_path)))
        for pid in worker_processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(LaunchError, match=r"without a word.*1 workers have died.*_log\.err"):
            until(lambda: not pool.check())


def test_a_worker_without_its_harness_says_what_to_run(tmp_path: Path, ledger: Ledger, ledger_root: Path) -> None:
    spec = spec_of(tmp_path, ledger_root, tmp_path / "empty", harness=True)
    with (
        WorkerPool(LaunchSettings(), spec, ledger) as pool,
        pytest.raises(UserError, match=r"harness pi: .*install_harness\.sh pi"),
    ):
        until(lambda: not pool.check())


@pytest.mark.sandbox
def test_a_worker_that_was_idle_for_too_long_is_replaced_and_has_not_died(
    tmp_path: Path, ledger: Ledger, ledger_root: Path, cache_dir: Path
) -> None:
    spec = replace(spec_of(tmp_path, ledger_root, cache_dir), worker=WorkerSettings(idle_min=0.1, poll_s=0.01))
    with WorkerPool(LaunchSettings(max_restarts=0), spec, ledger) as pool:
        (first,) = pool.check()
        until(lambda: pool.check() != frozenset({first}))


@pytest.mark.parametrize("gpus", [None, "", "1,0", "MIG-6a0a"])
def test_a_worker_on_this_machine_has_the_gpus_that_its_campaign_has(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, gpus: str | None
) -> None:
    if gpus is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    paths, group = RunPaths(tmp_path / "run"), make_group("a", num_samples=1)
    plan = StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=(group,))
    publish_plan(paths, plan)
    with WorkerPool(LaunchSettings(), stub_spec(paths.root), ledger, StubWorker):
        until(lambda: bool(read_step(paths, plan)))
    (record,) = read_step(paths, plan)
    assert record.detail.split(" ")[2] == ("-" if gpus is None else gpus)
