"""How workers are started. Light to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from clawhpc.errors import at_least


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """What Slurm is asked for, for each worker. What is None is the cluster's own default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    """Features of a node: `h200`, `[rack1|rack2]`."""
    gres: str | None = None
    """`gpu:h200:2`; or `gpus_per_node`, where the cluster prefers that."""
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    """Nobody else on the node."""
    array_parallelism: int | None = None
    """Workers that run at the same time, of all that are in the queue; None for all of them."""
    signal_delay_s: int = 90
    """So long before its time is up a worker goes back into the queue, under the same id."""
    sbatch: dict[str, str | int | bool] = field(default_factory=dict)
    """Any other option of sbatch, by its long name: `{reservation: maint, nice: 100, requeue: true}`."""
    srun: tuple[str, ...] = ()
    """Options of the srun that starts a worker: `[--container-image=/images/clawhpc.sqsh, --mpi=none]`."""
    setup: tuple[str, ...] = ()
    """Lines of shell before that: `[module load cuda]`."""
    watch_s: float = 10.0
    """Between two questions to Slurm who lives."""
    lease_s: float = 120.0
    """A worker whose campaign has given no sign of life for so long ends, and takes its whole array out of the queue.
    More than a shared file system needs to show a change on another host.
    """

    def __post_init__(self) -> None:
        at_least(self, signal_delay_s=1, watch_s=0.1, lease_s=1)
        for name in ("gpus_per_node", "cpus_per_task", "mem_gb", "array_parallelism"):
            if getattr(self, name) is not None:
                at_least(self, **{name: 0 if name == "gpus_per_node" else 0.1 if name == "mem_gb" else 1})


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How workers are started."""

    cluster: Literal["local", "slurm"] = "local"
    """`local`: processes of this machine; `slurm`: batch jobs, an array of them."""
    num_workers: int = 1
    """Allocations that collect rollouts at the same time, each with an engine of its own."""
    timeout_min: int = 1440
    """Wall-clock limit of one worker job. On Slurm it then waits in the queue for its next turn."""
    max_restarts: int = 3
    """How many workers may die within an hour before a campaign gives up. On Slurm those do not count that it took
    itself: preempted, on a node that failed.
    """
    slurm: SlurmSettings = field(default_factory=SlurmSettings)

    def __post_init__(self) -> None:
        at_least(self, num_workers=1, timeout_min=1, max_restarts=0)
