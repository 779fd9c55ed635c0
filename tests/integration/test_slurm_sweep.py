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


def test_a_sweep_over_harnesses_and_deadlines_is_one_array_of_whole_campaigns(slurm: SlurmCluster, desk: Desk) -> None:
    names = "h_${harness.names.0}_${limits.deadline_s}"
    swept = {"harness": "claude_code,pi", "limits.deadline_s": "60,90", "limits.reserve_s": 30, "run.name": names}
    command = desk.start(**LAUNCHER, **NO_ROLLOUTS, **swept)
    assert command.wait(300) == 0, command.text()
    runs = sorted(path.parent.parent.name for path in desk.folder.glob("runs/*/001/finished.json"))
    assert runs == ["h_claude_code_60", "h_claude_code_90", "h_pi_60", "h_pi_90"]
    for name in runs:
        config = msgspec.yaml.decode((desk.folder / "runs" / name / "001/config.yaml").read_bytes())
        assert name == f"h_{config['harness']['names'][0]}_{config['limits']['deadline_s']:g}"
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
