"""A command as a job of Slurm: when it is one, which one, and what is said of its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from clawhpc.config import RunConfig, RunSettings
from clawhpc.estimate.settings import PlanSettings
from clawhpc.job import as_campaign, explain_end, follow_to_the_end, submit_job
from clawhpc.launch.campaign import SubmittedCampaign
from clawhpc.launch.settings import LaunchSettings, SlurmSettings
from clawhpc.launch.states import JobStatus
from clawhpc.learner.settings import LearnerSettings
from tests.fakes.sbatch import fake_sbatch

JOB = SubmittedCampaign(job_id="7", folder=Path("/runs/jobs/x"), is_new=True)


def config_in(folder: Path, **changes: object) -> RunConfig:
    slurm = SlurmSettings(setup=("export A=${HOME}",))  # what Hydra would take for its own
    launch = LaunchSettings(cluster="slurm", slurm=slurm)
    config = RunConfig(run=RunSettings(root=str(folder)), launch=launch, learner=LearnerSettings(lr=1e-7))
    return replace(config, **changes)  # type: ignore[arg-type]


def test_in_a_job_a_command_runs_right_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[RunConfig] = []

    def train(config: RunConfig) -> None:
        seen.append(config)

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    as_campaign(train)(config_in(tmp_path))
    as_campaign(train)(config_in(tmp_path, plan=PlanSettings(calls=7)))
    assert seen == [config_in(tmp_path)] * 2, "what a plan takes for granted makes no other run"
    assert list(tmp_path.iterdir()) == []


def test_what_a_job_reads_is_the_configuration_as_it_was_when_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = fake_sbatch(tmp_path, monkeypatch)
    config = config_in(tmp_path / "runs")
    job = submit_job("train", config)
    assert job.is_new
    assert f"--output={job.log}".replace("41_0", "%j_0") in script.read_text()
    assert msgspec.yaml.decode((job.folder / "config.yaml").read_bytes(), type=RunConfig) == config


def test_each_configuration_and_each_command_has_a_job_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sbatch(tmp_path, monkeypatch)
    config = config_in(tmp_path / "runs")
    folders = [
        submit_job(name, one).folder
        for name, one in (("train", config), ("sft", config), ("sft", replace(config, seed=1)))
    ]
    assert len(set(folders)) == 3


@pytest.mark.parametrize(
    ("status", "last_line", "said"),
    [
        (
            JobStatus(state="FAILED", exit_code=2),
            "clawhpc: no such policy",
            "no such policy: job 7: FAILED; its log is ",
        ),
        (JobStatus(state="FAILED", exit_code=1), "KeyError: 3", "job 7: FAILED; its log is "),
        (JobStatus(state="CANCELLED"), "clawhpc: interrupted", "job 7: CANCELLED; its log is "),
        (JobStatus(state="COMPLETED", nodes="n1"), "step 1", "job 7: COMPLETED on n1, but Slurm lost its step before "),
    ],
)
def test_why_a_job_ended_is_said_in_its_own_words_where_it_had_some(
    status: JobStatus, last_line: str, said: str
) -> None:
    line = explain_end(JOB, status, last_line)
    assert line.startswith(said)
    assert line.endswith("the same command goes on") == (status.state != "FAILED")


@pytest.mark.parametrize("returned", [True, False])
def test_a_job_that_slurm_calls_completed_has_done_its_work_only_where_its_command_has_returned(
    returned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if returned:
        (tmp_path / "7_0_result.pkl").touch()
    monkeypatch.setattr("clawhpc.job.follow", lambda job, watch_s: (JobStatus(state="COMPLETED"), "step 1"))
    monkeypatch.setattr("clawhpc.job.RETURN_S", 0.0)
    job = SubmittedCampaign(job_id="7", folder=tmp_path, is_new=True)
    if returned:
        follow_to_the_end(job, watch_s=1.0)
    else:
        with pytest.raises(SystemExit, match="1"):
            follow_to_the_end(job, watch_s=1.0)
        assert "the same command goes on" in capsys.readouterr().err
