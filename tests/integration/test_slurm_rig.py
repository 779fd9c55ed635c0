"""The Slurm of the tests itself: it counts GPUs, and leaves nothing. How jobs end in it: the other tests of Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawhpc.ledger.reap import find_marked
from tests.sandbox_parts import running
from tests.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.slurm

OWNER = """
import sys, time
from pathlib import Path
from clawhpc.ledger import Ledger
from tests.slurm_cluster import SlurmCluster
ledger = Ledger.open(Path(sys.argv[1]))
cluster = SlurmCluster(ledger, accounting=False, nodes=("n1",))
cluster.start()
cluster.run("sbatch", "--output=/dev/null", f"--wrap=setsid sleep {sys.argv[2]} & sleep {sys.argv[2]}")
time.sleep(120)
"""


@pytest.fixture
def owner(slurm_programs: None, ledger_root: Path, needle: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started a cluster, on which a job runs."""
    command = [sys.executable, "-c", OWNER, str(ledger_root), needle]
    process = subprocess.Popen(command)
    yield process
    process.kill()
    process.wait()


def test_a_job_gets_the_gpus_that_it_asks_for_and_no_job_those_that_there_are_not(slurm: SlurmCluster) -> None:
    show = ("bash", "-c", "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES")
    assert slurm.run("srun", "--gres=gpu:h200:2", "--nodelist=n2", *show) == "n2 0,1\n"
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        slurm.run("srun", "--gres=gpu:9", *show)


@pytest.mark.slow
def test_of_a_killed_owner_no_daemon_no_job_and_no_file_is_left(
    owner: subprocess.Popen[bytes], ledger_root: Path, needle: str
) -> None:
    until(lambda: len(running(f"sleep {needle}")) >= 2)
    os.kill(owner.pid, signal.SIGKILL)
    until(lambda: not running(f"sleep {needle}"))
    until(lambda: not find_marked(str(ledger_root), set()) and not list(ledger_root.iterdir()))
