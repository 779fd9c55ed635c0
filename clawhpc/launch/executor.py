"""Make a submitit executor from settings, for workers or for a campaign's own job; and submit with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from clawhpc.errors import LaunchError, UserError
from clawhpc.launch.settings import CampaignJobSettings, JobSettings, LaunchSettings
from clawhpc.launch.states import SlurmStates

JOB_NAME = "clawhpc"
"""Of workers."""
CAMPAIGN_NAME = "clawhpc-campaign"
QUIET = "export SUBMITIT_LOG_LEVEL=ERROR"
"""In the log of a campaign there is what the campaign says."""
MAX_TIMEOUTS = 1_000_000
"""How often submitit puts a job back into the queue whose time was up; when to end is for the campaign to say."""
NO_THROTTLE = 1_000_000
"""submitit always writes a limit; this is more than any array has elements."""
ALSO_OF_OTHERS = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
"""Variables that tell Slurm's commands what to do, and do not describe a job."""


def make_executor(settings: LaunchSettings, folder: Path, last_lines: Sequence[str] = ()) -> submitit.AutoExecutor:
    """For workers: an executor that keeps its job files in `folder`. UserError where this cannot be done here.

    `last_lines`: of shell, which end the script of a job on Slurm, however its worker has ended.
    On Slurm it also makes submitit ask Slurm as often as `settings` say, for all jobs of this process.
    """
    if settings.cluster == "local":
        executor = submitit.AutoExecutor(folder, cluster="local")
    else:
        executor = _slurm_executor(settings.slurm, folder)
        executor.update_parameters(
            slurm_array_parallelism=settings.slurm.array_parallelism or NO_THROTTLE,
            slurm_teardown=list(last_lines) or None,
        )
        submitit.SlurmJob.watcher = SlurmStates(settings.slurm.watch_s)
    executor.update_parameters(timeout_min=settings.timeout_min, name=JOB_NAME)
    return executor


def campaign_executor(
    settings: CampaignJobSettings, num_nodes: int, folder: Path, last_lines: Sequence[str] = ()
) -> submitit.AutoExecutor:
    """For a campaign's own job: its one process is on the first of the nodes. UserError where there is no Slurm."""
    executor = _slurm_executor(settings, folder)
    executor.update_parameters(
        timeout_min=settings.timeout_min,
        name=CAMPAIGN_NAME,
        nodes=num_nodes,
        slurm_srun_args=["--nodes=1", "--ntasks=1", "--relative=0", *srun_arguments(settings)],
        slurm_stderr_to_stdout=True,
        slurm_setup=[*settings.setup, QUIET],
        slurm_teardown=list(last_lines) or None,
    )
    return executor


def _slurm_executor(settings: JobSettings, folder: Path) -> submitit.AutoExecutor:
    try:
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=MAX_TIMEOUTS)
    except RuntimeError as error:
        raise UserError(f"launch.cluster=slurm: {error}") from error
    executor.update_parameters(**slurm_parameters(settings))
    return executor


def slurm_parameters(settings: JobSettings) -> dict[str, Any]:
    """What submitit calls the settings. Slurm puts a job back into the queue only if that was asked for."""
    return {
        "gpus_per_node": settings.gpus_per_node,
        "cpus_per_task": settings.cpus_per_task,
        "mem_gb": settings.mem_gb,
        "slurm_partition": settings.partition,
        "slurm_account": settings.account,
        "slurm_qos": settings.qos,
        "slurm_constraint": settings.constraint,
        "slurm_gres": settings.gres,
        "slurm_nodelist": settings.nodelist,
        "slurm_exclude": settings.exclude,
        "slurm_exclusive": settings.exclusive or None,
        "slurm_signal_delay_s": settings.signal_delay_s,
        "slurm_additional_parameters": {"requeue": True, **settings.sbatch},
        "slurm_srun_args": srun_arguments(settings),
        "slurm_setup": list(settings.setup),
    }


def srun_arguments(settings: JobSettings) -> list[str]:
    """Options of the srun in a job. Since Slurm 22.05 it no longer takes the number of CPUs from sbatch."""
    cpus = [] if settings.cpus_per_task is None else [f"--cpus-per-task={settings.cpus_per_task}"]
    return [*cpus, *settings.srun]


def submit(executor: submitit.AutoExecutor, tasks: Sequence[Callable[[], None]]) -> list[submitit.Job[None]]:
    """One job for each of `tasks`, in their order; on Slurm they are the elements of one array.

    LaunchError, with Slurm's own words, when it does not take them.
    """
    try:
        with outside_of_jobs(), executor.batch():
            return [executor.submit(task) for task in tasks]
    except (FailedJobError, FailedSubmissionError) as error:
        raise LaunchError(f"sbatch: {error}") from error


@contextmanager
def outside_of_jobs() -> Iterator[None]:
    """What is submitted within the block does not take itself for the job that submits it.

    sbatch hands its environment on. In a job, that says which one it is and what it was given; an element of an array
    that submits a plain job would make that one look for another's files.
    """
    ours = {key: os.environ.pop(key) for key in [*os.environ] if key.startswith("SLURM") and key not in ALSO_OF_OTHERS}
    try:
        yield
    finally:
        os.environ.update(ours)
