"""How workers are started. Light to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from clawhpc.errors import at_least


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How workers are started."""

    cluster: Literal["local", "slurm"] = "local"
    """`local`: processes of this machine; `slurm`: batch jobs."""
    num_workers: int = 1
    """Allocations that collect rollouts at the same time, each with an engine of its own."""
    timeout_min: int = 1440
    """Wall-clock limit of one worker job."""
    max_restarts: int = 3
    """How many workers may die within an hour before a campaign gives up."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Handed to submitit as they are: slurm_partition, slurm_account, gpus_per_node, cpus_per_task, mem_gb, …"""

    def __post_init__(self) -> None:
        at_least(self, num_workers=1, timeout_min=1, max_restarts=0)
