"""What is asked of Slurm, and how workers are started. Light to import."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from clawhpc.errors import at_least


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What Slurm is asked for, for one job. What is None is the cluster's own default."""

    partition: str | None = None
    """Several with commas between; on a command line they want quotes, for to Hydra a comma is a sweep."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    """Features of a node: `h200`, `[rack1|rack2]`."""
    gres: str | None = None
    """`gpu:h200:2`, where the cluster wants GPUs asked for so, with `gpus_per_node=null`."""
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    """Of each node."""
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    """Nobody else on the node."""
    signal_delay_s: int = 90
    """So long before its time is up a job ends what it does, and goes back into the queue."""
    sbatch: dict[str, str | int | bool] = field(default_factory=dict)
    """Any other option of sbatch, by its long name: `{reservation: maint, nice: 100, spread-job: true}`."""
    srun: tuple[str, ...] = ()
    """Options of the srun that starts it: `[--container-image=/images/clawhpc.sqsh, --mpi=none]`."""
    setup: tuple[str, ...] = ()
    """Lines of shell before that: `[module load cuda]`."""

    def __post_init__(self) -> None:
        at_least(self, signal_delay_s=1)
        for name, least in {"gpus_per_node": 0, "cpus_per_task": 1, "mem_gb": 0.1}.items():
            if getattr(self, name) is not None:
                at_least(self, **{name: least})
        for option, value in self.sbatch.items():
            if value is False:  # submitit would write `--requeue=False`, which sbatch refuses
                raise ValueError(
                    f"sbatch.{option}=false: true gives an option that has no value; one that is not wanted is left out"
                )
        if self.gpus_per_node is not None and self._gpus_of_gres is not None:
            raise ValueError(
                f"gres={self.gres} and gpus_per_node={self.gpus_per_node} both ask for GPUs, which sbatch refuses; set "
                "one of them to null"
            )

    @property
    def num_gpus(self) -> int | None:
        """Of a node; None where it does not ask for any in so many words."""
        return self._gpus_of_gres if self.gpus_per_node is None else self.gpus_per_node

    @property
    def _gpus_of_gres(self) -> int | None:
        found = re.search(r"(?:^|,)gpu(?::[^:,]+)*?(?::(\d+))?(?:,|$)", self.gres or "")
        return int(found[1] or 1) if found else None


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(JobSettings):
    """What Slurm is asked for, for each worker, and how often."""

    array_parallelism: int | None = None
    """Workers of one array that run at the same time; None for all of them. Those that take the place of workers that
    have ended are an array of their own, with the same limit: of all together there are never more than `num_workers`.
    """
    watch_s: float = 10.0
    """Between two questions to Slurm who lives."""
    lease_s: float = 120.0
    """A worker whose campaign has given no sign of life for so long ends, and takes its whole array out of the queue.
    More than a shared file system needs to show a change on another host. The time in which it answers nobody does
    not count.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, watch_s=0.1, lease_s=1)
        if self.array_parallelism is not None:
            at_least(self, array_parallelism=1)


@dataclass(frozen=True, kw_only=True)
class CampaignJobSettings(JobSettings):
    """What Slurm is asked for, for the job of the campaign itself: the learner's GPUs, on `learner.num_nodes` nodes."""

    timeout_min: int = 1440
    """Wall-clock limit. The job then waits in the queue for its next turn, and goes on with its run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, timeout_min=1)


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How workers, and on a cluster the campaign, are started."""

    cluster: Literal["local", "slurm"] = "local"
    """`local`: processes of this machine; `slurm`: batch jobs, one for the campaign and an array for its workers."""
    num_workers: int = 1
    """Allocations that collect rollouts at the same time, each with an engine of its own."""
    timeout_min: int = 1440
    """Wall-clock limit of one worker job. On Slurm it then waits in the queue for its next turn."""
    max_restarts: int = 3
    """How many workers may die within an hour before a campaign gives up. On Slurm those do not count that it took
    itself: preempted, on a node that failed.
    """
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    campaign: CampaignJobSettings = field(default_factory=CampaignJobSettings)

    def __post_init__(self) -> None:
        at_least(self, num_workers=1, timeout_min=1, max_restarts=0)
