"""Rank 0 that waits, with one rank on the other host of its Slurm job: `python -m tests.fakes.leader LOGS`."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from clawhpc.launch.allocation import learner_hosts
from clawhpc.learner.ranks import Ranks, lead_ranks

ROOT = Path(__file__).parents[2]


def lead(logs: Path) -> AbstractContextManager[Ranks]:
    """The other rank says its process id, and waits."""
    command = [sys.executable, "-m", "tests.fakes.rank", "wait"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return lead_ranks(1, command, hosts=learner_hosts(2), logs=logs, environment=environment, cuda=False)


if __name__ == "__main__":
    with lead(Path(sys.argv[1])) as ranks:
        print(ranks.gather(0)[1], flush=True)
        time.sleep(120)
