"""A Hydra sweep through a real Slurm: each run is an element of one array, and a campaign of its own."""

from __future__ import annotations

import msgspec
import pytest

from tests.campaign_parts import Desk
from tests.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.harness, pytest.mark.sandbox, pytest.mark.slow]

LAUNCHER = {
    "hydra.mode": "MULTIRUN",
    "hydra/launcher": "submitit_slurm",
    "hydra.launcher.cpus_per_task": 2,
    "hydra.launcher.mem_gb": 1,
    "hydra.launcher.timeout_min": 10,
}
NO_ROLLOUTS = {"campaign.num_steps": 0, "campaign.eval_tasks": 0}
"""The campaign begins, with a worker, and ends: an engine for each of four would take minutes."""


def test_a_sweep_of_an_experiment_is_one_array_of_whole_campaigns(slurm: SlurmCluster, desk: Desk) -> None:
    swept = {"experiment": "timeout_hardening", "limits.settle_s": 4, "learner.wandb": "disabled"}
    command = desk.start_plain("train", {"policy.folder": desk.policy, **LAUNCHER, **NO_ROLLOUTS, **swept})
    assert command.wait(300) == 0, command.text()
    runs = {path.parent.parent.name: path.parent for path in desk.folder.glob("runs/*/001/finished.json")}
    assert {*runs} == {
        f"timeout_{deadline}s_settle_4s_attempts_{attempts}" for deadline in (20, 60) for attempts in (1, 3)
    }
    for name, run in runs.items():
        config = msgspec.yaml.decode((run / "config.yaml").read_bytes())
        told = (config["limits"]["deadline_s"], config["limits"]["settle_s"], config["worker"]["max_attempts"])
        assert name == "timeout_{:g}s_settle_{:g}s_attempts_{}".format(*told)
    assert len(list(desk.folder.glob("multirun/**/*_submission.sh"))) == 1
    slurm.until(lambda: not slurm.queue())


def test_a_run_of_a_sweep_that_fails_makes_the_sweep_fail_and_the_others_are_whole(
    slurm: SlurmCluster, desk: Desk
) -> None:
    swept = {"policy.folder": f"{desk.policy},{desk.folder}/nowhere", "run.name": "r_${hydra:job.num}"}
    command = desk.start(**LAUNCHER, **NO_ROLLOUTS, **swept)
    assert command.wait(300) != 0
    assert "nowhere: no such policy folder" in command.text()
    slurm.until(lambda: not slurm.queue())
    assert [path.parent.parent.name for path in desk.folder.glob("runs/*/001/finished.json")] == ["r_0"]
