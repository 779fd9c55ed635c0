"""A turn of a Slurm job: one that is put back into the queue has several, and none leaves anything to the next."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clawhpc.ledger import default_root, end_job

log = logging.getLogger(__name__)


def this_job() -> str:
    """The Slurm job that this process is in, as JOB.NODE.TURN. Empty where it is in none, or beside it, as in the shell
    that salloc opens on a login node.
    """
    job_id, node = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    return f"{job_id}.{node}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job_id and node else ""


@contextmanager
def alone_in_job(scratch_root: str | None, job: str) -> Iterator[None]:
    """Of a former turn of `job` nothing is on its node within the block; of this one nothing after it."""
    root = Path(scratch_root) if scratch_root else default_root()
    for failure in end_job(root, job).failures if job else ():
        log.warning(failure)
    try:
        yield
    finally:
        if job:
            end_job(root, job)


def script_end(scratch_root: str | None) -> list[str]:
    """The last lines of a job's script: nothing of what it ran is left on its host, though that was killed."""
    clean = shlex.join([sys.executable, "-m", "clawhpc.ledger"])
    this = "$SLURM_JOB_ID.$SLURMD_NODENAME.${SLURM_RESTART_COUNT:-0}"
    return ["code=$?", f'{clean} "{this}" {shlex.quote(scratch_root or "")}', "exit $code"]
