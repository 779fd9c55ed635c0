"""How workers are started. Light to import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CLUSTERS = ("local", "slurm")


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How workers are started."""

    cluster: str = "local"
    """`local`: processes of this machine; `slurm`: batch jobs."""
    num_workers: int = 1
    """Allocations that collect rollouts at the same time, each with an engine of its own."""
    timeout_min: int = 1440
    """Wall-clock limit of one worker job."""
    max_restarts: int = 3
    """How many dead workers one campaign replaces before it gives up."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Handed to submitit as they are: slurm_partition, slurm_account, gpus_per_node, cpus_per_task, mem_gb, …"""
