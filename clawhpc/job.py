"""A command as a campaign: here, or as a job of Slurm that this terminal follows.

The job runs `python -m clawhpc.job NAME FILE`: the command on the configuration as it was when it was submitted,
whatever has become of the files that it came from.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from clawhpc.command import (
    EXIT_INTERRUPTED,
    EXIT_MACHINE,
    FAILED,
    fail,
    one_line_errors,
    prepare_process,
    start_log,
)
from clawhpc.config import RunConfig
from clawhpc.estimate.settings import PlanSettings
from clawhpc.launch.campaign import SubmittedCampaign, submit_campaign
from clawhpc.launch.follow import follow
from clawhpc.launch.states import JobStatus
from clawhpc.ledger.parent import die_with_parent
from clawhpc.store import write_atomic

log = logging.getLogger(__name__)

RETURN_S = 60.0
"""For what a job has returned to be seen here: so long may a shared file system look away."""


def as_campaign(task: Callable[[RunConfig], None]) -> Callable[[RunConfig], None]:
    """`task`, which with `launch=slurm` runs in a job of its own; in a job already, it runs right there.

    `task` bears the name of its module: clawhpc.train.train.
    """

    @functools.wraps(task)
    def run(config: RunConfig) -> None:
        config = dataclasses.replace(config, plan=PlanSettings())  # what a plan takes for granted makes no other run
        if config.launch.cluster == "slurm" and "SLURM_JOB_ID" not in os.environ:
            submit_and_follow(task.__name__, config)
        else:
            task(config)

    return run


def submit_and_follow(name: str, config: RunConfig) -> None:
    """Show the job of this very configuration until it ends, and end as it does."""
    follow_to_the_end(submit_job(name, config), config.launch.slurm.watch_s)


def follow_to_the_end(job: SubmittedCampaign, watch_s: float) -> None:
    """SystemExit, with its exit code and why, unless it has done its work. Ctrl-C leaves it alone."""
    log.info("job %s %s; its log is %s", job.job_id, "is submitted" if job.is_new else "is there already", job.log)
    log.info("Ctrl-C leaves it to itself; `scancel %s` ends it", job.job_id)
    try:
        status, last_line = follow(job, watch_s)
    except KeyboardInterrupt:
        again = f"the same command shows its log again, `scancel {job.job_id}` ends it"
        fail(f"job {job.job_id} goes on: {again}", EXIT_INTERRUPTED)
    if status.state != "COMPLETED" or not job.has_returned(within_s=RETURN_S):
        fail(explain_end(job, status, last_line), status.exit_code or EXIT_MACHINE)


def submit_job(name: str, config: RunConfig) -> SubmittedCampaign:
    """The job of this configuration, with all of its files in a folder of its own beside the runs."""
    content = msgspec.yaml.encode(config)
    digest = hashlib.sha256(content).hexdigest()[:8]
    folder = Path(config.run.root) / "jobs" / f"{name}-{config.run.name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.yaml", content)
    command = (sys.executable, "-m", "clawhpc.job", name, str(folder / "config.yaml"))
    launch, num_nodes = config.launch.campaign, config.learner.num_nodes
    return submit_campaign(launch, num_nodes, folder, command, scratch_root=config.scratch_dir)


def explain_end(job: SubmittedCampaign, status: JobStatus, last_line: str) -> str:
    """Why a job has not done its work, in its own words if it had any; and if somebody ended it, that it can go on."""
    failed = status.state == "FAILED"
    lost = ", but Slurm lost its step before the command had ended" if status.state == "COMPLETED" else ""
    why = last_line.removeprefix(FAILED) + ": " if last_line.startswith(FAILED) and failed else ""
    more = "" if failed else "; the same command goes on"
    return f"{why}job {job.job_id}: {status}{lost}; its log is {job.log}{more}"


@one_line_errors()
def main(name: str, file: str) -> None:
    """Run a command in its job."""
    prepare_process()
    task = getattr(importlib.import_module(f"clawhpc.{name}"), name)
    start_log()
    task(msgspec.yaml.decode(Path(file).read_bytes(), type=RunConfig))


if __name__ == "__main__":
    die_with_parent()  # which Slurm takes for the job
    main(*sys.argv[1:])
