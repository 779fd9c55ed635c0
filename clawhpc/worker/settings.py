"""What a worker is told. Light to import: a configuration error must cost nothing."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from clawhpc.errors import at_least
from clawhpc.harness.base import HarnessSettings
from clawhpc.proxy.settings import EndpointSettings
from clawhpc.records import Limits, StepPlan
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.verify.settings import VerifySettings

STOP_FILE = "stop"
"""In a worker's folder: it is to end."""
READY_FILE = "ready"
"""In a worker's folder: its parts have started, at least once."""


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
    max_attempts: int = 2
    """How often one rollout is run that the machine fails. What fails by chance rarely does so twice; what fails twice
    fails because of the task or the machine, and each attempt may cost a whole deadline.
    """
    max_failed_starts: int = 3
    """How often in a row the engine may fail to start: then its host is bad, and the worker gives its work back."""
    max_engine_starts: int = 6
    """How often the engine may be started in one plan: one that dies is started again, with the weights that its plan
    names. More than the draws of one reply in all attempts, so that a prompt that an engine dies of does not end the
    worker.
    """
    strict_fields: bool = False
    """Refuse a request with a field that docs/protocols.md does not list. Else it is recorded, counted and ignored."""

    def __post_init__(self) -> None:
        at_least(self, concurrency=1, max_output_tokens=1, poll_s=0.01, idle_min=0.001)
        at_least(self, max_attempts=1, max_failed_starts=1, max_engine_starts=1)


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
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    """Where one is set, it answers in the engine's place, which is not started."""
    verify: VerifySettings = field(default_factory=VerifySettings)
    policy_steps: Set[int] | None = None
    """It takes plans for these PolicyVersions only; None: for any. In an evaluation the plans of a run have several
    answerers, and a worker whose campaign was killed may see, for as long as a lease, those of the next one.
    """

    def takes(self, plan: StepPlan) -> bool:
        """The plan is for its workers to collect."""
        return self.policy_steps is None or plan.policy_step in self.policy_steps
