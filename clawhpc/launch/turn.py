"""A turn of a Slurm job: one that is put back into the queue has several, and none leaves anything to the next."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawhpc.errors import LaunchError
from clawhpc.launch.states import JobStatus, look_up
from clawhpc.ledger import default_root, end_job

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Which turn of which job."""

    job_id: str
    """Of an element of an array, its own."""
    number: int
    """How often the job was put back into the queue before."""


def this_turn() -> Turn | None:
    """That in which this process is; None outside of Slurm."""
    job_id = os.environ.get("SLURM_JOB_ID")
    return Turn(job_id=job_id, number=int(os.environ.get("SLURM_RESTART_COUNT", "0"))) if job_id else None


def this_job() -> str:
    """The Slurm job that this process is in, as JOB.NODE.TURN. Empty where it is in none, or beside it, as in the shell
    that salloc opens on a login node.
    """
    job_id, node = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    return f"{job_id}.{node}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job_id and node else ""


def status_here() -> JobStatus | None:
    """Of this job's present turn: GONE when Slurm is at another one. None while it does not answer."""
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job_id = f"{array}_{element}" if array else os.environ["SLURM_JOB_ID"]  # which may be that of the whole array
    try:
        status = look_up(job_id)
    except LaunchError:
        return None
    return status if status.restarts == int(os.environ.get("SLURM_RESTART_COUNT", "0")) else JobStatus()


def go_back_if_warned() -> None:
    """Put this job back into the queue, by submitit's signal, where Slurm has it told to end and not ended it.

    A partition with a GraceTime warns a job like that before it preempts it; one that ends then has failed.
    """
    if (here := status_here()) and here.state == "RUNNING":
        log.info("told to end by a job that Slurm has not ended: it is about to be preempted")
        signal.raise_signal(signal.SIGUSR2)


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
