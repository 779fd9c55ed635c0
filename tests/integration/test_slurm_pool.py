"""Workers as elements of an array of a real Slurm: throttled, requeued, cancelled, lost, and replaced; none is left."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from clawhpc.campaign.collect import Collector
from clawhpc.errors import LaunchError
from clawhpc.launch.pool import WorkerPool
from clawhpc.launch.settings import LaunchSettings, SlurmSettings
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord, StepPlan
from clawhpc.store import claim_owner, publish_plan, read_step
from clawhpc.worker.settings import READY_FILE
from tests.fakes.records import make_group
from tests.fakes.slurm_worker import SlowStub, StubWorker, stub_spec
from tests.sandbox_parts import running
from tests.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.slurm

SMALL = SlurmSettings(cpus_per_task=1, mem_gb=0.2, watch_s=1.0, lease_s=6.0)
"""What a stub asks for, and a cluster that is asked often."""


def plan_of(*tasks: str, num_samples: int = 2) -> StepPlan:
    groups = tuple(make_group(task, num_samples=num_samples) for task in tasks)
    return StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=groups)


def settings_of(num_workers: int = 2, max_restarts: int = 3, **slurm: object) -> LaunchSettings:
    return LaunchSettings(
        cluster="slurm",
        num_workers=num_workers,
        timeout_min=10,
        max_restarts=max_restarts,
        slurm=replace(SMALL, **slurm),  # type: ignore[arg-type]
    )


@dataclass
class Field:
    """A run, and its workers on Slurm."""

    pool: WorkerPool
    paths: RunPaths

    def collect(self, plan: StepPlan) -> list[RolloutRecord]:
        return Collector(self.paths, self.pool, stall_min=2.0).collect(plan)

    def job_of(self, worker_id: str) -> str:
        return self.pool._jobs[worker_id].job_id


@pytest.fixture
def open_field(slurm: SlurmCluster, tmp_path: Path, ledger: Ledger) -> Callable[..., object]:
    @contextmanager
    def opened(settings: LaunchSettings | None = None, make_job: type[StubWorker] = StubWorker) -> Iterator[Field]:
        spec = stub_spec(tmp_path / "run")
        with WorkerPool(settings or settings_of(), spec, ledger, make_job) as pool:
            yield Field(pool, RunPaths(tmp_path / "run"))

    return opened


def complete(records: list[RolloutRecord], plan: StepPlan) -> bool:
    return len({record.rollout_id for record in records}) == len(records) == plan.num_rollouts


def workers_of(records: list[RolloutRecord]) -> set[str]:
    return {record.worker_id for record in records}


def test_an_array_runs_as_many_at_a_time_as_it_may_each_with_its_gpu(
    slurm: SlurmCluster, open_field: Callable, tmp_path: Path
) -> None:
    plan = plan_of(*"abcdefgh")
    with open_field(settings_of(num_workers=5, array_parallelism=2, gres="gpu:1")) as field:
        assert len({field.job_of(worker_id).partition("_")[0] for worker_id in field.pool._jobs}) == 1, "one array"
        slurm.until(lambda: Counter(slurm.queue().values()) == {"RUNNING": 2, "PENDING": 3})
        slurm.until(lambda: len(field.pool.check()) == 2)
        records = field.collect(plan)
        assert complete(records, plan)
        assert len(workers_of(records)) <= 2
        assert {record.detail.split()[2] for record in records} <= {"0", "1"}
        assert len({tuple(record.detail.split()[1:3]) for record in records}) == len(workers_of(records))
    slurm.until(lambda: not slurm.queue())


def owners(paths: RunPaths, plan: StepPlan) -> list[str | None]:
    """Who has claimed each group."""
    return [claim_owner(paths, group.key) for group in plan.groups]


def begin(field: Field, plan: StepPlan) -> str:
    """Have `plan` collected; a worker that is at work on it."""
    publish_plan(field.paths, plan)
    until(lambda: any(owners(field.paths, plan)))
    return next(owner for owner in owners(field.paths, plan) if owner)


def test_an_element_that_is_cancelled_is_replaced_and_what_it_had_claimed_is_taken_over(
    slurm: SlurmCluster, open_field: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(*"abcd", num_samples=4)
    with open_field(make_job=SlowStub) as field, caplog.at_level(logging.WARNING):
        victim = begin(field, plan)
        slurm.run("scancel", field.job_of(victim))
        records = field.collect(plan)
        assert complete(records, plan)
        until(lambda: victim not in field.pool.check())
        assert len(field.pool._jobs) == 2
    assert f"worker {victim} has died" in caplog.text


def test_elements_that_end_without_a_word_end_the_campaign_with_the_log_and_slurms_word_where_they_are_too_many(
    open_field: Callable,
) -> None:
    with (
        open_field(settings_of(max_restarts=0)) as field,
        pytest.raises(LaunchError, match=r"without a word \(job \d+_\d, FAILED on n\d\) .*_log\.err"),
    ):
        field.collect(plan_of("exit-7"))


def excluded_by_those_that_wait(slurm: SlurmCluster) -> list[str]:
    return slurm.run("squeue", "--noheader", "--array", "--state=PENDING", "--format=%x").split()


def test_an_element_on_a_bad_host_gives_its_work_back_and_says_why_and_no_other_goes_there(
    slurm: SlurmCluster, open_field: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of("a", "give-up-once")
    with open_field(settings_of(num_workers=3, array_parallelism=1)) as field:
        assert complete(field.collect(plan), plan)
        why = re.compile(r"died: the engine has failed to start 3 times in a row \(job \d+_\d on (\S+)\)")
        until(lambda: field.pool.check() and why.search(caplog.text) is not None)
        (told,) = why.finditer(caplog.text)
        slurm.until(lambda: field.pool.check() and excluded_by_those_that_wait(slurm) == [told[1]], within_s=20)
    submissions = (field.paths.workers / "submitit").glob("*_submission.sh")
    assert sorted(f"--exclude={told[1]}" in path.read_text() for path in submissions) == [False, True]


@pytest.mark.slow
def test_an_element_that_is_told_to_make_room_goes_on_later_under_the_same_id(
    slurm: SlurmCluster, open_field: Callable
) -> None:
    plan = plan_of(*"ab", num_samples=8)
    with open_field(make_job=SlowStub) as field:
        worker_id = begin(field, plan)
        until(lambda: worker_id in workers_of(read_step(field.paths, plan)))
        slurm.run("scancel", "--signal=USR2", field.job_of(worker_id))
        slurm.until(lambda: slurm.queue().get(field.job_of(worker_id)) == "PENDING")
        field.pool._looked_at = -1e9
        assert worker_id not in field.pool.check()
        slurm.until(lambda: worker_id in field.pool.check())
        records = field.collect(plan)
    assert complete(records, plan)
    assert {record.detail.split()[3] for record in records if record.worker_id == worker_id} == {"-", "1"}


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["low", "low_warned"])
def test_a_preempted_element_goes_on_when_there_is_room_again(
    slurm: SlurmCluster, open_field: Callable, partition: str
) -> None:
    plan = plan_of(*"abcdef", num_samples=4)
    with open_field(settings_of(partition=partition, cpus_per_task=8), SlowStub) as field:
        worker_id = begin(field, plan)
        node = slurm.run("squeue", "--noheader", "--format=%N", f"--jobs={field.job_of(worker_id)}").strip()
        slurm.run(
            *(
                "sbatch",
                "--partition=high",
                f"--nodelist={node}",
                "--cpus-per-task=8",
                "--mem=100",
                "--output=/dev/null",
            ),
            "--wrap=sleep 3",
        )
        slurm.until(lambda: slurm.queue().get(field.job_of(worker_id)) == "PENDING")
        records = field.collect(plan)
        assert complete(records, plan)
        assert worker_id in field.pool._jobs, "it has not died"


def test_a_campaign_in_an_element_of_an_array_has_workers_that_do_not_take_themselves_for_it(
    open_field: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_MEM_PER_CPU": "1"}
    for key, value in {**job, "SLURM_MEM_PER_NODE": "9", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(key, value)
    plan = plan_of("a")
    with open_field(settings_of(num_workers=1)) as field:
        assert complete(field.collect(plan), plan)
    assert job.items() <= os.environ.items()


def is_guarded(root: Path) -> bool:
    """A worker on `root` has a watchdog that no signal to the job ends."""
    ignored = [
        re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text()) for pid in running(f"reap.py {root} ")
    ]
    return any(int(match[1], 16) & 1 << (signal.SIGTERM - 1) for match in ignored if match)


@pytest.mark.sandbox
def test_a_real_worker_goes_back_into_the_queue_when_told_and_ends_without_a_result_when_cancelled(
    slurm: SlurmCluster, tmp_path: Path, ledger: Ledger, ledger_root: Path
) -> None:
    scratch = ledger_root / "workers"
    spec = replace(stub_spec(tmp_path / "run"), scratch_root=str(scratch))
    with WorkerPool(settings_of(num_workers=1), spec, ledger) as pool:
        (job,) = pool._jobs.values()
        slurm.until(lambda: is_guarded(scratch))
        slurm.run("scancel", "--signal=USR2", job.job_id)
        slurm.until(lambda: slurm.queue().get(job.job_id) == "PENDING")
        until(lambda: not list(scratch.iterdir()))
        slurm.until(lambda: is_guarded(scratch))
        slurm.run("scancel", job.job_id)
        slurm.until(lambda: slurm.state(job.job_id).startswith("CANCELLED"))
        until(lambda: not list(scratch.iterdir()))
        assert not job.paths.result_pickle.exists()


@pytest.mark.slow
def test_an_element_whose_time_is_up_goes_back_into_the_queue_and_goes_on(
    slurm: SlurmCluster, open_field: Callable
) -> None:
    plan = plan_of(*"ab", num_samples=60)
    settings = replace(settings_of(num_workers=2, signal_delay_s=40), timeout_min=1)
    with open_field(settings, SlowStub) as field:
        workers = {*field.pool._jobs}
        records = field.collect(plan)
        assert complete(records, plan)
        assert {*field.pool._jobs} == workers
    assert {record.detail.split()[3] for record in records} >= {"-", "1"}


@pytest.mark.slow
def test_of_a_node_that_is_lost_the_elements_go_on_elsewhere(slurm: SlurmCluster, open_field: Callable) -> None:
    plan = plan_of(*"abcdef", num_samples=20)
    with open_field(settings_of(num_workers=3, cpus_per_task=5), SlowStub) as field:
        worker_id = begin(field, plan)
        node = slurm.run("squeue", "--noheader", "--format=%N", f"--jobs={field.job_of(worker_id)}").strip()
        slurm.kill_node(node)
        try:
            assert complete(field.collect(plan), plan)
            slurm.until(lambda: slurm.node_states()[node].startswith("down"))
        finally:
            slurm.start_node(node)
            slurm.until(lambda: slurm.node_states()[node] in ("idle", "mixed"))


def test_what_slurm_refuses_ends_the_campaign_with_slurms_own_words(open_field: Callable) -> None:
    with (
        pytest.raises(LaunchError, match="invalid partition specified: nowhere"),
        open_field(settings_of(partition="nowhere")),
    ):
        pass


CAMPAIGN = """
import sys
from pathlib import Path
from clawhpc.launch.pool import WorkerPool
from clawhpc.ledger import Ledger
from tests.fakes.slurm_worker import StubWorker, stub_spec
from tests.integration.test_slurm_pool import settings_of
root = Path(sys.argv[1])
ledger = Ledger.open(root / "ledger")
settings = settings_of(num_workers=4, array_parallelism=int(sys.argv[2]), lease_s=float(sys.argv[3]))
with WorkerPool(settings, stub_spec(root / "run"), ledger, StubWorker):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def campaign(root: Path, array_parallelism: int, lease_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A process with four workers, until its standard input is closed."""
    command = [sys.executable, "-c", CAMPAIGN, str(root), str(array_parallelism), str(lease_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_of_a_killed_campaign_no_element_is_left_those_in_the_queue_included(
    slurm: SlurmCluster, ledger_root: Path
) -> None:
    with campaign(ledger_root, array_parallelism=2, lease_s=4.0) as process:
        slurm.until(lambda: Counter(slurm.queue().values()) == {"RUNNING": 2, "PENDING": 2})
        os.kill(process.pid, signal.SIGKILL)
        slurm.until(lambda: not slurm.queue())


def test_a_campaign_that_goes_on_cancels_what_the_killed_one_has_left(
    slurm: SlurmCluster, ledger_root: Path, ledger: Ledger
) -> None:
    with campaign(ledger_root, array_parallelism=1, lease_s=600.0) as process:
        slurm.until(lambda: Counter(slurm.queue().values()) == {"RUNNING": 1, "PENDING": 3})
        until(lambda: any(ledger_root.glob(f"run/workers/*/{READY_FILE}")))  # it looks at the lease again in a minute
        os.kill(process.pid, signal.SIGKILL)
    left = {*slurm.queue()}
    with WorkerPool(settings_of(), stub_spec(ledger_root / "run"), ledger, StubWorker):
        slurm.until(lambda: not left & {*slurm.queue()})
        assert len([*ledger_root.glob("run/workers/submitit/*_submission.sh")]) == 1, "nobody cancels those again"


def test_without_accounts_the_queue_says_who_lives_and_one_that_ends_without_a_word_is_replaced(
    open_field: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sacct = tmp_path / "bin/sacct"
    sacct.parent.mkdir()
    sacct.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sacct.parent}:{os.environ['PATH']}")
    plan = plan_of("a", "exit-7-once")
    with open_field() as field:
        assert complete(field.collect(plan), plan)
        until(
            lambda: field.pool.check() and re.search(r"a word \(job \d+_\d, (FAILED|GONE) on", caplog.text) is not None
        )
