"""Which job a campaign is, as its files and its environment tell. What Slurm makes of it: test_slurm_campaign.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clawhpc.launch.campaign import is_alive, newest_job
from clawhpc.launch.turn import Turn, this_job, this_turn


def test_the_newest_job_is_the_one_that_was_submitted_last_also_when_ids_have_begun_anew(tmp_path: Path) -> None:
    assert newest_job(tmp_path) is None
    for age, name in enumerate(("12", "7", "99999", "100000")):
        script = tmp_path / f"{name}_submission.sh"
        script.touch()
        os.utime(script, (1000 - age, 1000 - age))
    (tmp_path / "submission_file_ab.sh").touch()  # one that was cut off
    assert newest_job(tmp_path) == "12"


@pytest.mark.parametrize(
    ("name", "state", "alive"),
    [("clawhpc-campaign", "PENDING", True), ("clawhpc-campaign", "FAILED", False), ("another", "RUNNING", False)],
)
def test_a_campaign_that_is_there_is_no_job_that_has_its_number_by_now(
    name: str, state: str, alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho JobId=7 JobName={name} JobState={state} ExitCode=0:0\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert is_alive("7") is alive


@pytest.mark.parametrize(
    ("known", "job", "turn"),
    [
        ({}, "", None),
        ({"SLURM_JOB_ID": "7"}, "", Turn(job_id="7", number=0)),  # the shell that salloc opens on a login node
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, "7.n1.0", Turn(job_id="7", number=0)),
        (
            {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1.site", "SLURM_RESTART_COUNT": "2"},
            "7.n1.site.2",
            Turn(job_id="7", number=2),
        ),
    ],
)
def test_a_process_is_in_a_turn_of_a_job_on_its_node(
    known: dict[str, str], job: str, turn: Turn | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    assert (this_job(), this_turn()) == (job, turn)
