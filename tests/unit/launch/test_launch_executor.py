"""What is asked of Slurm: the text that goes to sbatch, and what of our own job does not."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from clawhpc.errors import LaunchError, UserError
from clawhpc.launch.executor import make_executor, outside_of_jobs, submit
from clawhpc.launch.settings import CampaignJobSettings, JobSettings, LaunchSettings, SlurmSettings
from tests.fakes.sbatch import fake_sbatch, read_script

GOLDEN = """\
#!/bin/bash

# Parameters
#SBATCH --account=mine
#SBATCH --array=0-2%2
#SBATCH --constraint=h200
#SBATCH --cpus-per-task=16
#SBATCH --error=FOLDER/%A_%a_0_log.err
#SBATCH --exclude=n9
#SBATCH --exclusive
#SBATCH --gres=gpu:h200:2
#SBATCH --job-name=clawhpc
#SBATCH --mem=64GB
#SBATCH --nice=100
#SBATCH --nodes=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/%A_%a_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=720
#SBATCH --wckey=submitit

# setup
module load cuda

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/%A_%a_%t_log.out --error FOLDER/%A_%a_%t_log.err SRUN FOLDER
""".replace("SRUN", "--cpus-per-task=16 --container-image=/i.sqsh PYTHON -u -m submitit.core._submit")
SETTINGS = SlurmSettings(
    partition="gpu",
    account="mine",
    qos="long",
    constraint="h200",
    gres="gpu:h200:2",
    cpus_per_task=16,
    mem_gb=64,
    exclude="n9",
    exclusive=True,
    array_parallelism=2,
    signal_delay_s=120,
    sbatch={"nice": 100},
    srun=("--container-image=/i.sqsh",),
    setup=("module load cuda",),
)


def nothing() -> None:
    """A task."""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where what the last `sbatch` was given is."""
    return fake_sbatch(tmp_path, monkeypatch)


def test_the_script_for_sbatch_is_golden(sbatch: Path, tmp_path: Path) -> None:
    settings = LaunchSettings(cluster="slurm", timeout_min=720, slurm=SETTINGS)
    jobs = submit(make_executor(settings, tmp_path / "jobs"), [nothing] * 3)
    assert [job.job_id for job in jobs] == ["41_0", "41_1", "41_2"]
    assert read_script(sbatch, tmp_path / "jobs") == GOLDEN


def test_what_is_not_set_is_left_to_the_cluster(sbatch: Path, tmp_path: Path) -> None:
    submit(make_executor(LaunchSettings(cluster="slurm"), tmp_path / "jobs"), [nothing])
    script = sbatch.read_text()
    for option in ("partition", "account", "qos", "mem", "gres", "gpus", "cpus", "constraint", "exclusive", "array"):
        assert f"#SBATCH --{option}" not in script


def test_a_job_that_submits_hands_on_what_tells_slurm_what_to_do_and_not_which_job_it_is(
    sbatch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURMD_NODENAME": "n1", "SLURM_CONF": "/conf"}
    for key, value in {**described, "SBATCH_ACCOUNT": "mine"}.items():
        monkeypatch.setenv(key, value)
    submit(make_executor(LaunchSettings(cluster="slurm"), tmp_path / "jobs"), [nothing])
    handed_on = Path(f"{sbatch}.env").read_text()
    assert "SLURM_CONF=/conf\n" in handed_on
    assert "SBATCH_ACCOUNT=mine\n" in handed_on
    assert not any(key in handed_on for key in ("SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURMD_NODENAME"))
    assert described.items() <= os.environ.items()


def test_the_environment_is_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with suppress(OSError), outside_of_jobs():
        assert "SLURM_JOB_ID" not in os.environ
        raise OSError
    assert os.environ["SLURM_JOB_ID"] == "7"


def test_where_there_is_no_slurm_the_setting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"launch\.cluster=slurm: .*srun"):
        make_executor(LaunchSettings(cluster="slurm"), tmp_path)


def test_what_sbatch_refuses_is_told_in_its_own_words(sbatch: Path, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="Invalid account"):
        submit(make_executor(LaunchSettings(cluster="slurm"), tmp_path / "jobs"), [nothing])


@pytest.mark.parametrize("gres", ["gpu", "gpu:h200:2", "nvme:1,gpu:h200"])
def test_gpus_are_asked_for_in_one_way(gres: str) -> None:
    with pytest.raises(ValueError, match=f"gres={gres} and gpus_per_node=0 both .*set one of them to null"):
        SlurmSettings(gres=gres, gpus_per_node=0)
    assert SlurmSettings(gres=gres).gpus_per_node is None
    assert SlurmSettings(gres="nvme:1", gpus_per_node=2).gres == "nvme:1"


@pytest.mark.parametrize(
    "wrong", [{"mem_gb": 0.0}, {"array_parallelism": 0}, {"lease_s": 0.0}, {"watch_s": float("nan")}]
)
def test_settings_out_of_their_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*at least"):
        SlurmSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"timeout_min": 0}, {"signal_delay_s": 0}, {"cpus_per_task": 0}])
def test_so_are_those_of_the_campaigns_own_job(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*at least"):
        CampaignJobSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [SlurmSettings, CampaignJobSettings])
def test_an_option_of_sbatch_is_given_or_left_out(settings: type[JobSettings]) -> None:
    settings(sbatch={"nice": 0, "spread-job": True})
    with pytest.raises(ValueError, match=r"sbatch\.requeue=false: true gives an option"):
        settings(sbatch={"requeue": False})
