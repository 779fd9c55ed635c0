"""What is planned, and what has become of it."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from clawhpc.records.call import CallRecord
from clawhpc.records.judgement import Judgement
from clawhpc.records.mcp import McpCall
from clawhpc.records.task import ExecResult, TaskSpec

Phase = Literal["train", "eval", "capture"]


@dataclass(frozen=True, kw_only=True, order=True)
class GroupKey:
    """The rollouts that are compared with one another: one `(task, harness)` at one step."""

    phase: Phase
    step: int
    task_id: str
    harness: str

    @property
    def name(self) -> str:
        """A folder name inside its phase and step: equal for equal keys, different for different ones."""
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", self.task_id)[:48]
        digest = hashlib.sha256(f"{self.task_id}\0{self.harness}".encode()).hexdigest()[:8]
        return f"{readable}--{self.harness}--{digest}"


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """One group that a worker is asked to collect (campaign -> worker). Whole in itself: it carries its task."""

    key: GroupKey
    task: TaskSpec
    num_samples: int
    seed: int
    """Sampling seed of sample 0; sample i uses `seed + i`."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The groups of one step and phase (campaign -> worker)."""

    phase: Phase
    step: int
    policy_step: int
    """The PolicyVersion that must draw the tokens."""
    temperature: float
    groups: tuple[GroupPlan, ...]

    @property
    def name(self) -> str:
        """Among the plans of a run."""
        return f"{self.phase}-{self.step:06d}"

    @property
    def num_rollouts(self) -> int:
        """Planned rollouts of all groups."""
        return sum(group.num_samples for group in self.groups)


class Outcome(StrEnum):
    """How a rollout ended. Each planned rollout ends with exactly one."""

    COMPLETED = "completed"
    HARNESS_EXIT = "harness_exit"
    TIMEOUT = "timeout"
    LIMIT = "limit"
    SANDBOX_FAILED = "sandbox_failed"
    ENGINE_FAILED = "engine_failed"
    PROXY_FAILED = "proxy_failed"
    VERIFIER_FAILED = "verifier_failed"
    CANCELLED = "cancelled"
    OVER_BRANCHED = "over_branched"


POLICY_OUTCOMES = frozenset({Outcome.COMPLETED, Outcome.HARNESS_EXIT, Outcome.TIMEOUT, Outcome.LIMIT})
"""The policy's own doing: verified as it stands, and the reward trains."""
MACHINE_OUTCOMES = frozenset(
    {Outcome.SANDBOX_FAILED, Outcome.ENGINE_FAILED, Outcome.PROXY_FAILED, Outcome.VERIFIER_FAILED}
)
"""A part of the machine failed: the same rollout, run again, may well have a verdict."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the verifier said (verify -> rollout)."""

    reward: float
    """In [0, 1]. What trains."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """The parts that it was made of, by name."""
    unshaped: float | None = None
    """What it was before shaping, in [0, 1]; None where nothing was shaped."""
    judgement: Judgement | None = None
    """Of a task with a rubric."""

    def __post_init__(self) -> None:
        for reward in (self.reward, self.raw_reward):
            if not 0.0 <= reward <= 1.0:
                raise ValueError(f"reward {reward} is not in [0, 1]")

    @property
    def raw_reward(self) -> float:
        """What the verifier said of the workspace, whatever trains: by this a rollout passes."""
        return self.reward if self.unshaped is None else self.unshaped


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall seconds of the phases of one rollout, and the CPU seconds of its harness."""

    started_at: float
    """Seconds since the epoch."""
    boot_s: float = 0.0
    run_s: float = 0.0
    settle_s: float = 0.0
    verify_s: float = 0.0
    teardown_s: float = 0.0
    harness_cpu_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Of all phases together."""
        return self.boot_s + self.run_s + self.settle_s + self.verify_s + self.teardown_s


@dataclass(frozen=True, kw_only=True)
class FailedAttempt:
    """A run of the same rollout, with the same seed, that the machine failed. Nothing else of it is kept."""

    outcome: Outcome
    detail: str
    seconds: float
    """Wall clock, from boot to teardown."""


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One harness run on one task, whole (rollout -> store -> learner)."""

    rollout_id: str
    key: GroupKey
    sample: int
    seed: int
    temperature: float
    """At which its tokens were drawn."""
    instruction: str
    calls: tuple[CallRecord, ...]
    outcome: Outcome
    detail: str
    """For a person: why it ended so. Empty for `completed`."""
    verdict: Verdict | None
    """None when the outcome is of the infrastructure."""
    exec_result: ExecResult | None
    timings: Timings
    worker_id: str
    dropped_leaves: dict[str, int] = field(default_factory=dict)
    """Named rule -> leaves that it dropped (law 4)."""
    mcp_calls: tuple[McpCall, ...] = ()
    """Of servers on the host, in the order in which they were made."""
    mcp_counts: dict[str, int] = field(default_factory=dict)
    """What else crossed their sockets: server and method -> how often."""
    failed_attempts: tuple[FailedAttempt, ...] = ()
    """Those before this one, by the worker that published it, in order."""

    @property
    def num_attempts(self) -> int:
        """How often it was run, this attempt included."""
        return 1 + len(self.failed_attempts)

    @property
    def overridden(self) -> Counter[str]:
        """Request field that the campaign decides -> calls in which the harness asked for something else."""
        return Counter(name for call in self.calls for name in call.overridden)

    @property
    def unlisted(self) -> Counter[str]:
        """Request field that no table lists -> calls that had it."""
        return Counter(name for call in self.calls for name in call.unlisted)

    @property
    def trains(self) -> bool:
        """The reward of this rollout enters the baseline of its group."""
        return self.outcome in POLICY_OUTCOMES and self.verdict is not None


@dataclass(frozen=True, kw_only=True)
class EngineTime:
    """What engines have taken."""

    wall_s: float = 0.0
    """That they were held, their starts and their waiting included."""
    cpu_s: float = 0.0

    def __add__(self, other: EngineTime) -> EngineTime:
        return EngineTime(wall_s=self.wall_s + other.wall_s, cpu_s=self.cpu_s + other.cpu_s)


@dataclass(frozen=True, kw_only=True)
class WorkerUsage:
    """What a worker has cost so far (worker -> campaign). What its harnesses cost is in their rollouts."""

    own_cpu_s: float
    """CPU seconds of the worker's own process: proxy, rendering, rollouts."""
    engine_cpu_s: float
    engine_by_plan: dict[str, EngineTime] = field(default_factory=dict)
    """`StepPlan.name` -> what its engine took for the plan."""


def rollout_id(key: GroupKey, sample: int) -> str:
    """The one id of sample `sample` of group `key`; a retry of the same plan has the same (law 8)."""
    return f"{key.phase}-{key.step:06d}-{key.name}-{sample:03d}"
