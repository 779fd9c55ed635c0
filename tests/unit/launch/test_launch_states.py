"""What is made of Slurm's answers. The commands here are scripts that say what Slurm 22.05 says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clawhpc.errors import LaunchError
from clawhpc.launch.states import JobStatus, SlurmStates, look_up

HEAD = "JobID|State|NodeList"
DISABLED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts commands on PATH whose calls are counted, a line each, in the file that is returned."""
    calls = tmp_path / "calls"
    calls.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def put(**scripts: str) -> Path:
        for name, script in scripts.items():
            (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{calls}\n{script}\n')
            (tmp_path / name).chmod(0o755)
        return calls

    return put


def says(*rows: str, head: str = HEAD) -> str:
    return f"printf '%s\\n' {' '.join(repr(row) for row in (head, *rows))}"


def states_of(*job_ids: str) -> SlurmStates:
    states = SlurmStates(0.0)
    for job_id in job_ids:
        states.register_job(job_id)
    states.update()
    return states


def now(states: SlurmStates, job_id: str) -> tuple[str, bool]:
    return states.get_state(job_id, "cache"), states.is_done(job_id, "cache")


def test_one_question_is_for_all_jobs_and_none_is_asked_of_those_that_have_ended(commands: Callable[..., Path]) -> None:
    calls = commands(
        sacct=says("7_0|COMPLETED|n1", "7_0.batch|COMPLETED|n1", "7_1|RUNNING|n2", "7_[2-9%2]|PENDING|", "8|FAILED|n1")
    )
    states = states_of("7_0", "7_1", "7_5", "8")
    assert [now(states, one) for one in ("7_0", "7_1", "7_5", "8")] == [
        ("COMPLETED", True),
        ("RUNNING", False),
        ("PENDING", False),
        ("FAILED", True),
    ]
    states.update()
    assert [line.rpartition("--jobs=")[2] for line in calls.read_text().splitlines()] == ["7,8", "7"]


def test_a_job_that_failed_because_a_step_of_it_had_no_memory_is_out_of_memory(commands: Callable[..., Path]) -> None:
    failed = ("7_0|FAILED|n1", "7_0.batch|FAILED|n1", "7_0.0|OUT_OF_MEMORY|n1")
    others = ("7_1|FAILED|n1", "7_1.0|FAILED|n1", "7_2|RUNNING|n2", "7_2.0|OUT_OF_MEMORY|n2", "8.0|OUT_OF_MEMORY|n1")
    commands(sacct=says(*failed, *others))
    states = states_of("7_0", "7_1", "7_2", "8")
    assert [now(states, one) for one in ("7_0", "7_1", "7_2", "8")] == [
        ("OUT_OF_MEMORY", True),
        ("FAILED", True),
        ("RUNNING", False),
        ("UNKNOWN", False),
    ]


@pytest.mark.parametrize("state", ["SUSPENDED", "COMPLETING", "RESIZING", "REQUEUED", "PENDING"])
def test_a_job_in_a_state_that_it_comes_back_from_has_not_ended(commands: Callable[..., Path], state: str) -> None:
    commands(sacct=says(f"7|{state}|n1"))
    assert now(states_of("7"), "7") == (state, False)


def test_a_job_that_the_accounts_do_not_know_yet_has_not_ended(commands: Callable[..., Path]) -> None:
    commands(sacct=says())
    assert now(states_of("7"), "7") == ("UNKNOWN", False)


@pytest.mark.parametrize(
    ("queue", "expected"),
    [(["7_0|PENDING|"], ("PENDING", False)), (["7_0|PREEMPTED|n1"], ("PREEMPTED", True)), ([], ("PREEMPTED", True))],
    ids=["requeued", "cancelled", "forgotten"],
)
def test_of_a_job_that_was_preempted_the_queue_says_whether_it_comes_back(
    commands: Callable[..., Path], queue: list[str], expected: tuple[str, bool]
) -> None:
    commands(sacct=says("7_0|PREEMPTED|n1", "7_1|RUNNING|n1"), squeue=says(*queue, head="JOBID|STATE|NODELIST"))
    states = states_of("7_0", "7_1")
    assert now(states, "7_0") == expected
    assert now(states, "7_1") == ("RUNNING", False)


def test_without_accounts_the_queue_is_asked_and_whom_it_has_forgotten_has_ended(
    commands: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    queue = says("7_0|RUNNING|n1", "7_1|NODE_FAIL|n2", head="JOBID|STATE|NODELIST")
    calls = commands(sacct=DISABLED, squeue=queue)
    with caplog.at_level("INFO"):
        states = states_of("7_0", "7_1", "7_2")
        states.update()
    assert [now(states, one) for one in ("7_0", "7_1", "7_2")] == [
        ("RUNNING", False),
        ("NODE_FAIL", True),
        ("GONE", True),
    ]
    assert caplog.text.count("keeps no accounts") == 1
    asked = [line.split()[0] for line in calls.read_text().splitlines()]
    assert asked == ["sacct", "squeue", "squeue"]
    assert f"--user={os.getuid()}" in calls.read_text()


@pytest.mark.parametrize("sacct", ["echo 'Connection refused' >&2; exit 1", "kill -9 $$"], ids=["refused", "killed"])
def test_while_slurm_does_not_answer_what_it_said_last_stands(
    commands: Callable[..., Path], sacct: str, caplog: pytest.LogCaptureFixture
) -> None:
    commands(sacct=says("7|RUNNING|n1"))
    states = states_of("7")
    commands(sacct=sacct)
    states.update()
    assert now(states, "7") == ("RUNNING", False)
    assert "Slurm does not say" in caplog.text


SCONTROL = (
    "JobId=7 JobName=clawhpc-campaign UserId=me(1000) JobState={state} Reason={reason} Requeue=1 Restarts=2 "
    "ExitCode={code} ReqNodeList=n9 NodeList={nodes} Comment=a JobState=b"
)
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.mark.parametrize(
    ("state", "reason", "nodes", "code", "said"),
    [
        ("PENDING", "Resources", "(null)", "0:0", ("PENDING (Resources)", False, 0)),
        ("PENDING", "BeginTime", "n1", "0:15", ("PENDING (BeginTime)", False, 143)),
        ("RUNNING", "None", "n[1-2]", "0:0", ("RUNNING on n[1-2]", False, 0)),
        ("COMPLETING", "None", "n1", "0:0", ("COMPLETING on n1", False, 0)),
        ("FAILED", "NonZeroExitCode", "n1", "2:0", ("FAILED on n1", True, 2)),
    ],
)
def test_a_jobs_state_is_the_controllers_word(
    commands: Callable[..., Path], state: str, reason: str, nodes: str, code: str, said: tuple[str, bool, int]
) -> None:
    commands(scontrol=f"echo '{SCONTROL.format(state=state, reason=reason, nodes=nodes, code=code)}'")
    status = look_up("7")
    assert (str(status), status.ended, status.exit_code) == said
    assert (status.name, status.restarts) == ("clawhpc-campaign", 2)


@pytest.mark.parametrize(
    ("sacct", "expected"),
    [
        ("echo 'CANCELLED by 0|0:15'", JobStatus(state="CANCELLED by 0", exit_code=143)),
        ("echo", JobStatus(state="GONE")),
        (DISABLED, JobStatus(state="GONE")),
    ],
)
def test_of_a_job_that_the_controller_has_forgotten_the_accounts_say_how_it_ended(
    commands: Callable[..., Path], sacct: str, expected: JobStatus
) -> None:
    commands(scontrol=FORGOTTEN, sacct=sacct)
    assert look_up("7") == expected
    assert look_up("7").ended


def test_that_slurm_does_not_answer_is_no_state(commands: Callable[..., Path]) -> None:
    commands(scontrol="echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="job 7 is: Unable to contact slurm controller"):
        look_up("7")
