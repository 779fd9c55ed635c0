"""A collection by real jobs of a real submitit whose run lies on a small disk: it breaks, is mended, and goes on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from clawhpc.campaign.collect import Collector
from clawhpc.command import one_line_errors
from clawhpc.launch.pool import WorkerPool
from clawhpc.launch.settings import LaunchSettings
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import StepPlan
from clawhpc.store import read_rollouts, rollout_files
from tests.fakes.records import make_group
from tests.fakes.slurm_worker import StubWorker, stub_spec
from tests.fakes.small_disk import SmallDisk, run_scenario

SAMPLES = 40
PLAN = StepPlan(
    phase="train",
    step=0,
    policy_step=0,
    temperature=1.0,
    groups=tuple(make_group(task, num_samples=SAMPLES) for task in ("a", "b")),
)
PAGE = 4096


@dataclass(frozen=True)
class UnhurriedStub(StubWorker):
    """Time enough to break its disk."""

    rollout_s: float = 0.02


def collect(paths: RunPaths) -> None:
    """As a campaign does it, with all that ends one."""
    with (
        one_line_errors(),
        tempfile.TemporaryDirectory(prefix="disk-") as scratch,
        Ledger.open(Path(scratch) / "ledger") as ledger,
        WorkerPool(LaunchSettings(), stub_spec(paths.root), ledger, make_job=UnhurriedStub) as pool,
    ):
        Collector(paths, pool, stall_min=4.0, poll_s=0.05).collect(PLAN)


def break_in_the_middle(disk: SmallDisk, paths: RunPaths, break_it: Callable[[], None]) -> None:
    """Once some rollouts are there."""

    def wait_and_break() -> None:
        while len(rollout_files(paths)) < SAMPLES // 4:
            time.sleep(0.01)
        break_it()

    breaking = Thread(target=wait_and_break, daemon=True)
    breaking.start()
    stop_and_go_on(disk, paths, at_least=SAMPLES // 4)
    breaking.join(10)


def stop_and_go_on(disk: SmallDisk, paths: RunPaths, at_least: int = 0) -> None:
    """It stops on a disk that breaks or is broken, and once that is mended the same command completes it."""
    with suppress(SystemExit):
        collect(paths)
        raise AssertionError("it went on")
    assert not list(paths.root.rglob(".*.part")), "half-written"
    half_done = {record.rollout_id: record for record in read_rollouts(paths)}
    assert at_least <= len(half_done) < 2 * SAMPLES
    disk.mend()
    collect(paths)
    records = list(read_rollouts(paths))
    assert len({record.rollout_id for record in records}) == len(records) == 2 * SAMPLES
    assert half_done.items() <= {record.rollout_id: record for record in records}.items()


def run_full(disk: SmallDisk, leave_pages: int) -> None:
    paths = RunPaths(disk.folder / "001")
    break_in_the_middle(disk, paths, lambda: disk.fill(leave_bytes=leave_pages * PAGE))


def run_full_from_the_start(disk: SmallDisk) -> None:
    paths = RunPaths(disk.folder / "001")
    paths.workers.mkdir(parents=True)
    disk.fill()
    stop_and_go_on(disk, paths)


def run_read_only(disk: SmallDisk) -> None:
    break_in_the_middle(disk, RunPaths(disk.folder / "001"), disk.protect)


if __name__ == "__main__":
    run_scenario(
        {
            "full": lambda disk: run_full(disk, 0),
            "nearly full": lambda disk: run_full(disk, 20),
            "full from the start": run_full_from_the_start,
            "read-only": run_read_only,
        }
    )
