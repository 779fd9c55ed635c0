"""What is made of Slurm's answers. The commands here are scripts that say what Slurm 22.05 says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clawhpc.launch.states import SlurmStates

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
