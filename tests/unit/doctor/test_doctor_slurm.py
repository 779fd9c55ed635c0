"""What Slurm says, as Slurm 22.05 says it, and what it means for a campaign."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clawhpc.checkup.finding import Finding, State
from clawhpc.checkup.machine import TOO_LATE, Answer
from clawhpc.checkup.slurm import TOOLS, SlurmNeeds, check_slurm, count_gpus, minutes
from tests.fakes.machine import FakeMachine

CONFIG = """Configuration data as of 2026-11-30T08:36:42
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = claw
JobRequeue              = 1
MaxArraySize            = 10001
ProctrackType           = proctrack/cgroup
SLURM_VERSION           = 22.05.8
"""
NODES = """main*|up|infinite|3|8|8000|gpu:h200:4
main*|up|infinite|2|64|512000+|(null)
short|up|30:00|3|8|8000|(null)
broken|down|7-00:00:00|1|8|8000|(null)
"""
NEEDS = SlurmNeeds(needed=True)


def machine(config: str = CONFIG, nodes: str = NODES, **answers: Answer) -> FakeMachine:
    good = {"sacct": Answer(0), "scontrol": Answer(0, config), "sinfo": Answer(0, nodes)}
    return FakeMachine(programs=TOOLS, answers={**good, **answers})


def rows_of(machine: FakeMachine, needs: SlurmNeeds = NEEDS) -> dict[str, Finding]:
    return {row.what: row for row in check_slurm(machine, needs)}


def test_a_whole_slurm_works() -> None:
    rows = rows_of(machine())
    assert {row.state for row in rows.values()} == {State.WORKS}
    assert rows["Slurm"].found == "22.05.8, cluster claw; the controller answers"
    assert rows["Slurm arrays"].found == "up to 10000 elements in one"
    assert rows["partition main"].found.splitlines() == [
        "up, 3 nodes of 8 cores, 7.8 GiB, gres gpu:h200:4, time infinite",
        "up, 2 nodes of 64 cores, 500.0 GiB, gres none, time infinite",
    ]
    assert "short: up" in rows["other partitions"].found


@pytest.mark.parametrize("needed", [True, False])
def test_a_machine_without_slurm(needed: bool) -> None:
    (row,) = check_slurm(FakeMachine(), SlurmNeeds(needed=needed))
    assert row.state is (State.MISSING if needed else State.NOT_NEEDED)
    assert row.found == "not on this machine"
    assert bool(row.remedy) == needed


def test_tools_that_are_not_there_are_named() -> None:
    (row,) = check_slurm(FakeMachine(programs=("sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")), NEEDS)
    assert (row.state, row.found) == (State.MISSING, "no sacct")


@pytest.mark.parametrize(
    "answer", [Answer(1, errors="Unable to contact slurm controller (connect failure)"), Answer(TOO_LATE)]
)
def test_a_controller_that_does_not_answer_is_one_row(answer: Answer) -> None:
    (row,) = check_slurm(machine(scontrol=answer), NEEDS)
    assert row.state is State.MISSING
    assert answer.reason in row.found


def test_without_accounting_nobody_knows_why_a_worker_has_died() -> None:
    row = rows_of(machine(CONFIG.replace("storage/slurmdbd", "storage/none")))["Slurm accounting"]
    assert row.state is State.LIMITED
    assert "slurmdbd" in row.remedy


def test_accounting_that_does_not_answer_is_missing_too() -> None:
    row = rows_of(machine(sacct=Answer(1, errors="sacct: error: Problem talking to the database")))["Slurm accounting"]
    assert (row.state, row.found) == (State.MISSING, "sacct: error: Problem talking to the database")


def test_requeue_arrays_and_tracking_have_their_limits() -> None:
    config = CONFIG.replace("JobRequeue              = 1", "JobRequeue              = 0")
    config = config.replace("= 10001", "= 5").replace("proctrack/cgroup", "proctrack/linuxproc")
    rows = rows_of(machine(config), replace(NEEDS, num_workers=8))
    assert (rows["Slurm requeue"].state, rows["Slurm requeue"].found) == (
        State.WORKS,
        "jobs are queued again if they ask for it, as ours do",
    )
    assert (rows["Slurm arrays"].state, rows["Slurm arrays"].remedy) == (State.MISSING, "launch.num_workers=4")
    assert rows["Slurm process tracking"].state is State.LIMITED


@pytest.mark.parametrize(
    ("needs", "what", "remedy"),
    [
        (replace(NEEDS, partition="gpu"), "partition", "NAME one of: main, short, broken"),
        (replace(NEEDS, partition="short", timeout_min=60), "partition short", "launch.timeout_min=30"),
        (replace(NEEDS, partition="broken"), "partition broken", "launch.slurm.partition=NAME"),
        (
            replace(NEEDS, partition="short", timeout_min=5, num_gpus=2),
            "partition short",
            "launch.slurm.gpus_per_node=0",
        ),
        (replace(NEEDS, num_cores=16, num_gpus=1), "partition main", "launch.slurm.cpus_per_task=8"),
        (
            replace(NEEDS, partition="short", timeout_min=5, num_cores=16, memory_gib=64),
            "partition short",
            "launch.slurm.cpus_per_task=8 launch.slurm.mem_gb=7",
        ),
    ],
)
def test_a_partition_that_cannot_run_the_workers_is_missing(needs: SlurmNeeds, what: str, remedy: str) -> None:
    row = rows_of(machine(), needs)[what]
    assert row.state is State.MISSING
    assert remedy in row.remedy
    assert rows_of(machine(), replace(needs, needed=False))[what].state is State.NOT_NEEDED


@pytest.mark.parametrize(
    ("asked", "what", "remedy"),
    [
        ({"partition": "short", "timeout_min": 60}, "campaign's partition short", "launch.campaign.timeout_min=30"),
        ({"num_cores": 65}, "campaign's partition main", "launch.campaign.cpus_per_task=8"),
        ({"partition": "gpu"}, "campaign's partition", "launch.campaign.partition=NAME, NAME one of: main, short"),
        ({"partition": "short", "timeout_min": 5}, "campaign's partition short", None),
    ],
)
def test_the_job_of_the_campaign_asks_for_its_own(asked: dict[str, Any], what: str, remedy: str | None) -> None:
    campaign = replace(NEEDS, settings="launch.campaign", timeout="launch.campaign.timeout_min", **asked)
    rows = {row.what: row for row in check_slurm(machine(), NEEDS, campaign)}
    assert rows["partition main"].state is State.WORKS
    assert rows[what].state is (State.MISSING if remedy else State.WORKS)
    assert (remedy or "") in rows[what].remedy
    if "short" in what:
        assert "short" not in rows["other partitions"].found


@pytest.mark.parametrize("needs", [replace(NEEDS, num_cores=64, memory_gib=500), replace(NEEDS, num_gpus=4)])
def test_one_kind_of_nodes_that_fits_is_enough(needs: SlurmNeeds) -> None:
    assert rows_of(machine(), needs)["partition main"].state is State.WORKS


def test_of_several_partitions_one_that_fits_is_enough() -> None:
    rows = rows_of(machine(), replace(NEEDS, partition="broken,short,main", num_gpus=2))
    assert rows["partition broken,short,main"].state is State.WORKS
    assert rows["partition broken,short,main"].found.splitlines()[2] == (
        "short: up, 3 nodes of 8 cores, 7.8 GiB, gres none, time 30:00"
    )
    assert "other partitions" not in rows


def test_several_partitions_of_which_none_fits_or_one_is_not_there_are_missing() -> None:
    row = rows_of(machine(), replace(NEEDS, partition="broken,short", timeout_min=60))["partition broken,short"]
    assert (row.state, row.remedy) == (State.MISSING, "launch.timeout_min=30")
    row = rows_of(machine(), replace(NEEDS, partition="main,gpu,big"))["partition"]
    assert (row.state, row.found) == (State.MISSING, "no gpu, big")


@pytest.mark.parametrize(
    ("gres", "expected"),
    [("(null)", 0), ("gpu:h200:4", 4), ("gpu:4(S:0-1),gpu:a100:2,shard:8", 6), ("gpu", 1), ("gpu:h200", 1)],
)
def test_gpus_are_counted(gres: str, expected: int) -> None:
    assert count_gpus(gres) == expected


def test_without_a_default_partition_one_must_be_named() -> None:
    row = rows_of(machine(nodes=NODES.replace("*", "")))["partition"]
    assert (row.state, row.found) == (State.MISSING, "there is no default one")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("infinite", float("inf")), ("30:00", 30), ("1:30:00", 90), ("7-00:00:00", 7 * 1440), ("n/a", float("inf"))],
)
def test_time_limits_are_read(limit: str, expected: float) -> None:
    assert minutes(limit) == expected
