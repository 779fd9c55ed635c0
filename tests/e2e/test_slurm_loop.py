"""The whole loop on a real Slurm, by one command: no stand-in for anything but the nodes, which are one machine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from clawhpc.paths import RunPaths
from clawhpc.records import Outcome
from clawhpc.store import published_steps, read_plans, read_policy, read_rollouts
from tests.campaign_parts import Desk
from tests.slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.engine, pytest.mark.harness, pytest.mark.sandbox]

END_S = 500.0
"""For all of it, on a busy machine with two cores."""
ON_TWO_NODES = {"experiment": "quickstart", "harness": "mixed", "tasks.mix": "each", "learner.num_nodes": 2}
REWARD = "echo 0.$((RANDOM % 10))$((RANDOM % 10))$((RANDOM % 10))"
"""What a verifier says of a policy that babbles: rewards that are all 0 would teach nothing."""
ASKED = {
    "launch": "slurm_cpu",
    "launch.num_workers": 2,
    "launch.slurm.cpus_per_task": 5,  # of 8: a node has no room for two workers
    "launch.slurm.mem_gb": 4,
    "launch.slurm.watch_s": 1,
    "launch.campaign.cpus_per_task": 2,
    "launch.campaign.mem_gb": 3,
}
SMALL = {"campaign.eval_tasks": 1, "worker.concurrency": 2, "limits.max_calls": 2}


def write_tasks(folder: Path, num_tasks: int) -> Path:
    """As many tasks in a user's own folder."""
    for number in range(num_tasks):
        task = folder / f"{folder.name}-{number}"
        (task / "reward").mkdir(parents=True)
        (task / "reward/reward.sh").write_text(REWARD)
        (task / "data_entry.json").write_text(json.dumps({"task_id": task.name, "user_query": "Say what you see."}))
    return folder


def nodes_of(slurm: SlurmCluster, folder: Path) -> list[str]:
    """The nodes on which the jobs ran whose files are below `folder`."""
    job_ids = [path.name.partition("_")[0] for path in folder.rglob("[0-9]*_submission.sh")]
    asked = ("--noheader", "--allocations", "--parsable2", "--format=NodeList", f"--jobs={','.join(job_ids)}")
    return sorted(slurm.run("sacct", *asked).split())


def check_records(paths: RunPaths) -> None:
    """Each planned rollout is in the store once, each harness has had its share, and two workers have shared them."""
    samples = [
        (group.key, sample)
        for plan in read_plans(paths)
        for group in plan.groups
        for sample in range(group.num_samples)
    ]
    records = list(read_rollouts(paths))
    assert Counter((one.key, one.sample) for one in records) == Counter(samples)
    shares = {("eval", 2), ("train", 4)}
    expected = {(phase, harness): count for phase, count in shares for harness in ("claude_code", "pi")}
    assert Counter((one.key.phase, one.key.harness) for one in records) == expected
    assert len({one.worker_id for one in records}) == 2
    for record in records:
        assert record.outcome in (Outcome.COMPLETED, Outcome.HARNESS_EXIT, Outcome.LIMIT), record.detail


def test_two_steps_of_the_quickstart_on_two_rollout_nodes_and_a_learner_of_two_processes_by_one_command(
    slurm: SlurmCluster, desk: Desk
) -> None:
    tasks = {"tasks.folder": write_tasks(desk.folder / "own", 2), "tasks.heldout": write_tasks(desk.folder / "held", 1)}
    command = desk.start(**ON_TWO_NODES, **ASKED, **SMALL, **tasks)
    assert command.wait(END_S) == 0, command.text()
    paths = desk.run_paths()
    check_records(paths)
    assert published_steps(paths) == [0, 1, 2]
    assert len({read_policy(paths.policy(step)).digest for step in (0, 1, 2)}) == 3
    assert json.loads(paths.finished.read_bytes())["steps"] == 2
    assert len({*nodes_of(slurm, paths.workers)}) == 2
    assert nodes_of(slurm, desk.folder / "runs/jobs") == ["n[1-2]"]
    assert (paths.metrics / "ranks/rank-1.log").exists()
    slurm.until(lambda: not slurm.queue())
    assert desk.left() == []
