"""What the job of a worker makes of being told to end. What Slurm makes of that: test_slurm_pool.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A worker is told to end as it works, or before it listens; or its campaign's lease runs out.
WORKER = """
import signal, sys, time
from dataclasses import replace
from pathlib import Path
from clawhpc.launch.job import Lease, WorkerJob
from tests.fakes.slurm_worker import stub_spec

class Told(WorkerJob):
    def _work(self):
        if sys.argv[2] == "by the lease":
            time.sleep(60)
        if sys.argv[2] == "early":
            signal.raise_signal(signal.SIGTERM)
        return signal.SIGTERM

def go_back(number, frame):
    print("goes back into the queue")
    sys.exit(0)

signal.signal(signal.SIGUSR2, go_back)
spec = replace(stub_spec(Path(sys.argv[1])), scratch_root=sys.argv[1] + "/scratch")
Told(spec, "w0", Lease("c1", 0.1 if sys.argv[2] == "by the lease" else 600.0))()
"""
GOES_BACK = (0, "goes back into the queue\n")
ENDS = (143, "")


@pytest.fixture
def tell(tmp_path: Path) -> Callable[[str, str], tuple[int, str]]:
    """Has a worker told to end, while Slurm says something of its job; its exit code, and what it says."""

    def told(how: str, state: str) -> tuple[int, str]:
        for name, script in {
            "scontrol": f'test "$4" = 7_0 && echo JobId=9 JobState={state}',
            "scancel": "exit 1",
        }.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        job = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURMD_NODENAME": "n1"}
        environment = {**os.environ, **job, "PATH": f"{tmp_path}:/usr/bin:/bin"}
        command = [sys.executable, "-c", WORKER, str(tmp_path), how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout

    return told


@pytest.mark.parametrize("how", ["at work", "early"])
def test_a_worker_that_is_warned_of_its_preemption_goes_back_into_the_queue(
    tell: Callable[[str, str], tuple[int, str]], how: str
) -> None:
    assert tell(how, "RUNNING Restarts=0") == GOES_BACK


@pytest.mark.parametrize("state", ["CANCELLED", "PENDING Restarts=1", "RUNNING Restarts=1"])
def test_one_whose_turn_slurm_has_ended_ends(tell: Callable[[str, str], tuple[int, str]], state: str) -> None:
    assert tell("at work", state) == ENDS


def test_so_does_one_whose_campaign_has_ended(tell: Callable[[str, str], tuple[int, str]]) -> None:
    assert tell("by the lease", "RUNNING Restarts=0") == ENDS
