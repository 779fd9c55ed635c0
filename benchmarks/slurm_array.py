"""An array of workers through a real Slurm: what one costs, what the controller is asked, and whether all of it is there.

    python -m benchmarks.slurm_array [--elements 1000] [--at-once 8]

It starts a Slurm of its own on this machine (tests/slurm_cluster.py), submits one array, each element of which publishes
one rollout that it makes up, and watches it as a campaign does. The commands of Slurm are counted by wrappers on PATH.
What an element takes here is mostly Python's start: Slurm's own part is measured with an array of `true`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawhpc.launch.executor import make_executor, submit
from clawhpc.launch.settings import LaunchSettings, SlurmSettings
from clawhpc.ledger import Ledger
from clawhpc.paths import RunPaths
from clawhpc.records import GroupPlan, StepPlan
from clawhpc.store import publish_plan, publish_rollout, read_step, seal_group, unsealed_groups
from tests.fakes.records import make_group, make_record
from tests.slurm_cluster import SlurmCluster

COMMANDS = ("sbatch", "srun", "sacct", "squeue", "scancel", "scontrol")
WATCH_S = 10.0
"""Between two questions to Slurm, as campaigns have it."""
POLL_S = 0.5
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Element:
    """Publishes one rollout, which is a whole group."""

    root: str
    group: GroupPlan

    def __call__(self) -> None:
        """Publish, and seal."""
        publish_rollout(RunPaths(Path(self.root)), make_record(self.group))
        seal_group(RunPaths(Path(self.root)), self.group)


@contextmanager
def counted(folder: Path) -> Iterator[Path]:
    """Calls of Slurm's commands by this process and by jobs are written, a line each, to the file that is given."""
    calls, former = folder / "calls", os.environ["PATH"]
    for name in COMMANDS:
        wrapper = folder / "bin" / name
        wrapper.parent.mkdir(exist_ok=True)
        wrapper.write_text(f'#!/bin/sh\necho {name} >>{calls}\nexec {shutil.which(name)} "$@"\n')
        wrapper.chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{former}"
    try:
        yield calls
    finally:
        os.environ["PATH"] = former


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--elements", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Ledger.open(Path(f"/tmp/clawhpc-slurm-{os.getuid()}")) as ledger,
    ):
        cluster = SlurmCluster(ledger)
        try:
            began = time.monotonic()
            cluster.start()
            start_s = time.monotonic() - began
            os.environ.update(cluster.environment)
            with counted(Path(folder)) as calls:
                result = measure(Path(folder), options.elements, options.at_once)
                result["calls"] = dict(Counter(calls.read_text().split()))
            result |= {"cluster_start_s": round(start_s, 1), "true_s_per_element": bare(cluster, options)}
        finally:
            cluster.stop()
    print(json.dumps(result, indent=2))


def measure(folder: Path, num_elements: int, at_once: int) -> dict[str, object]:
    """Submit, watch until all have ended by Slurm's word, and look at what they have left."""
    slurm = SlurmSettings(cpus_per_task=1, mem_gb=0.1, array_parallelism=at_once, watch_s=WATCH_S)
    settings = LaunchSettings(cluster="slurm", timeout_min=10, slurm=slurm)
    groups = tuple(make_group(f"t{number}", num_samples=1) for number in range(num_elements))
    plan = StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=groups)
    paths = RunPaths(folder / "run")
    publish_plan(paths, plan)
    executor = make_executor(settings, folder / "jobs")
    began = time.monotonic()
    jobs = submit(executor, [Element(str(paths.root), group) for group in groups])
    submit_s, first_s = time.monotonic() - began, None
    while not all(job.done() for job in jobs):
        assert time.monotonic() - began < LIMIT_S, "too slow"
        if first_s is None and len(unsealed_groups(paths, plan)) < num_elements:
            first_s = time.monotonic() - began
        time.sleep(POLL_S)
    wall_s = time.monotonic() - began
    records = read_step(paths, plan)
    return {
        "elements": num_elements,
        "at_once": at_once,
        "submit_s": round(submit_s, 2),
        "first_rollout_s": None if first_s is None else round(first_s, 2),
        "wall_s": round(wall_s, 1),
        "s_per_element": round(wall_s / num_elements, 3),
        "rollouts": len({record.rollout_id for record in records}),
        "unsealed_groups": len(unsealed_groups(paths, plan)),
        "failed": sum(job.exception() is not None for job in jobs),
    }


def bare(cluster: SlurmCluster, options: argparse.Namespace) -> float:
    """Seconds per element of an array that does nothing: Slurm's own part."""
    count = min(100, options.elements)
    began = time.monotonic()
    command = ("sbatch", "--wait", f"--array=0-{count - 1}%{options.at_once}", "--mem=100", "--output=/dev/null")
    cluster.run(*command, "--wrap=srun true", within_s=LIMIT_S)
    return round((time.monotonic() - began) / count, 3)


if __name__ == "__main__":
    main()
