"""The learner on two hosts of one job of a real Slurm. The nodes are virtual: both are this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from clawhpc.errors import LaunchError
from clawhpc.launch.allocation import learner_hosts
from clawhpc.ledger.reap import read_processes
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord
from tests.fakes.leader import lead
from tests.fakes.learner_campaign import SETTINGS, Campaign, close, rollouts
from tests.sandbox_parts import running
from tests.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
SHOW = "import os; print(os.environ['SLURMD_NODENAME'], os.environ['CUDA_VISIBLE_DEVICES'], os.environ['SLURM_NTASKS'])"
ASK = """
import subprocess, sys
from clawhpc.launch.allocation import learner_hosts
here, there = learner_hosts(2)
command = [*there.starter, sys.executable, "-c", sys.argv[1]]
print(here.name, subprocess.check_output(command, env=there.environment, text=True), end="", flush=True)
"""


@dataclass
class Job:
    """An allocation of two nodes; this process stands as on the first of them."""

    job_id: str
    slurm: SlurmCluster

    def steps(self) -> list[str]:
        """Those of its steps that run, or are ending."""
        listed = self.slurm.run("squeue", "--noheader", "--steps", f"--jobs={self.job_id}", "--format=%i")
        return [step for step in listed.split() if not step.endswith((".extern", ".batch"))]


@pytest.fixture
def job(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Job:
    slurm.run("salloc", "--no-shell", "--nodes=2", "--ntasks-per-node=1", "--mem=500", "--nodelist=n1,n2")
    (job_id,) = slurm.queue()
    for key, value in {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}.items():
        monkeypatch.setenv(key, value)
    return Job(job_id, slurm)


def test_a_batch_script_and_a_step_start_steps_on_the_other_node_that_see_its_gpus(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Whatever the job was asked for: what srun would take from the environment of either is not handed on."""
    ask = f"{sys.executable} -c '{ASK}' \"{SHOW}\""
    as_a_campaign = "srun --nodes=1 --ntasks=1 --relative=0 --cpus-per-task=2"
    script = tmp_path / "job.sh"
    ours = f"export PYTHONPATH={ROOT} CUDA_VISIBLE_DEVICES=7"
    script.write_text(f"#!/bin/sh\nset -e\n{ours}\n{ask}\n{as_a_campaign} {ask}\n")
    asked = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=3", "--mem=500", "--gpus-per-node=2")
    outputs = (f"--output={tmp_path}/out", f"--error={tmp_path}/error")
    slurm.run("sbatch", *asked, "--nodelist=n2,n3", *outputs, script)
    slurm.until(lambda: not slurm.queue())
    assert (tmp_path / "out").read_text() == "n2 n3 0,1 1\n" * 2, (tmp_path / "error").read_text()


def test_two_hosts_learn_what_one_process_does_and_a_rank_killed_on_the_other_is_named_with_its_host(
    job: Job, babbler: Path, tmp_path: Path
) -> None:
    """That the job's time is almost up is said to all of its processes, and rank 0's to answer: no other one ends."""

    def collect(step: int) -> list[RolloutRecord]:
        if step == 0:
            job.slurm.run("scancel", "--signal=USR2", job.job_id)
            for pid in own_sruns():
                os.kill(pid, signal.SIGUSR2)
        if step == 1:
            os.kill(rank_on_other_host(str(tmp_path)), signal.SIGKILL)
        return rollouts(step)

    two = Campaign(
        RunPaths(tmp_path / "two"),
        collect=collect,
        settings=replace(SETTINGS, num_nodes=2, accelerator="cpu"),
        hosts=learner_hosts(2),
    )
    with pytest.raises(LaunchError, match=r"rank 1 of the learner on n2 was killed by SIGKILL.*rank-1\.log"):
        two.train(babbler)
    one = Campaign(RunPaths(tmp_path / "one"), num_steps=1).train(babbler)
    assert close(load_file(two.run.policy(1) / "model.safetensors"), one)
    until(lambda: not job.steps())


def rank_on_other_host(needle: str) -> int:
    """That whose command contains `needle`, as that of its srun does."""
    (pid,) = [pid for pid in running(needle) if name_of(pid) != "srun"]
    return pid


def own_sruns() -> list[int]:
    return [pid for pid, row in read_processes().items() if row.parent == os.getpid() and name_of(pid) == "srun"]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.fixture
def leader(job: Job, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is rank 0, and prints the process id of rank 1, which is not its child."""
    command = [sys.executable, "-m", "tests.fakes.leader", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_rank_on_another_host_does_not_outlive_a_rank_0_that_is_killed(
    job: Job, leader: subprocess.Popen[str]
) -> None:
    assert leader.stdout is not None
    follower = int(leader.stdout.readline())
    assert len(job.steps()) == 1
    leader.kill()
    until(lambda: follower not in read_processes(), within_s=30)
    until(lambda: not job.steps())


@pytest.mark.slow
def test_a_rank_whose_srun_is_killed_ends_and_is_named(job: Job, tmp_path: Path) -> None:
    killed = r"rank 1 of the learner on n2 was killed by SIGKILL"
    with pytest.raises(LaunchError, match=killed), lead(tmp_path) as ranks:  # noqa: PT012
        follower = ranks.gather(0)[1]
        for pid in own_sruns():
            os.kill(pid, signal.SIGKILL)
        ranks.gather(0)
        ranks.gather(0)
    until(lambda: follower not in read_processes(), within_s=30)
    until(lambda: not job.steps())
