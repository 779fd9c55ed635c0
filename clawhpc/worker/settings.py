"""What a worker is told. Light to import: a configuration error must cost nothing."""

from __future__ import annotations

from dataclasses import dataclass

from clawhpc.harness.registry import HarnessSettings
from clawhpc.records import Limits
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings

STOP_FILE = "stop"
"""In a worker's folder: it is to end."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """How one worker works."""

    concurrency: int = 12
    """Rollouts at a time. A CPU engine draws for many at nearly the cost of one."""
    max_output_tokens: int = 256
    """Of one reply."""
    poll_s: float = 0.2
    """Between two looks for a plan; more on a shared file system."""
    idle_min: float = 60.0
    """Without work for so long, a worker ends by itself."""
    max_engine_starts: int = 3
    """How often an engine that dies is started again, with the same weights, before the worker gives up."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """All that a worker needs to know; it travels to its host in a pickle."""

    run_root: str
    cache_dir: str
    scratch_root: str | None
    """Node-local; None for a folder of the user's in /tmp."""
    worker: WorkerSettings
    engine: EngineSettings
    sandbox: SandboxSettings
    limits: Limits
    harnesses: dict[str, HarnessSettings]
    """Name -> settings."""
