"""The frozen types that cross boundaries between parts. No torch, no I/O, no clock.

Every sequence is a tuple and every type is keyword-only, so that a record can be hashed into a digest, shared between
threads, and written by `msgspec` as it stands. Text views (`Message`, `Reply`) are for harnesses, verifiers and people;
reinforcement learning trains on the ids in `Generation` and `CallRecord` only (law 1).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from clawhpc.errors import at_least

# ---------------------------------------------------------------------------------------------------------------------
# The conversation, as every wire protocol is reduced to it
# ---------------------------------------------------------------------------------------------------------------------

MessageRole = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "tool_calls", "length", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One tool call of an assistant message."""

    id: str
    """As the harness knows it; the proxy gives it. No part of a message's identity (harnesses rewrite ids)."""
    name: str
    arguments: str
    """JSON text. Compared in canonical form: parsed, keys sorted, 1.0 equal to 1."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation, protocol-neutral. Anthropic's tool_result blocks become `tool` messages."""

    role: MessageRole
    text: str = ""
    thinking: str = ""
    """Reasoning of an assistant message, where the harness sends it back."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of a `tool` message: the call that it answers."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that the harness offers to the model."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema, as the harness sent it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a harness asked for. In training the campaign's own values win."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    tool_choice: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One model request, protocol-neutral (wire -> proxy)."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False


@dataclass(frozen=True, kw_only=True)
class Usage:
    """True token counts of one call: what the engine received and drew."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the input tokens, those that the engine took from its prefix cache; 0 where it does not say."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The decoded view of one completion (proxy -> wire). What the harness makes of it never becomes training data."""

    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """`completion_ids[start:end]` were drawn by the weights of policy step `version` (law 9)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the engine received and drew (engine -> proxy)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """Sampled tokens, the stop token included when the model drew one."""
    sampling_logprobs: tuple[float, ...]
    """Aligned with `completion_ids`: natural log, under the distribution that the token was drawn from."""
    finish_reason: FinishReason
    weight_versions: tuple[VersionSpan, ...]
    """In order, without gaps, covering `completion_ids`."""
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.sampling_logprobs):
            raise ValueError(
                f"{len(self.completion_ids)} completion_ids but {len(self.sampling_logprobs)} sampling_logprobs"
            )
        position = 0
        for span in self.weight_versions:
            if span.start != position or span.end < span.start:
                raise ValueError(f"weight_versions have a gap or overlap at {position}: {self.weight_versions}")
            position = span.end
        if position != len(self.completion_ids):
            raise ValueError(f"weight_versions cover {position} of {len(self.completion_ids)} tokens")


class CallRole(StrEnum):
    """What a harness made a call for."""

    MAIN = "main"
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    SIDE = "side"


@dataclass(frozen=True, kw_only=True)
class Graft:
    """`prompt_ids[start:start + length]` of a call repeat the sampled reply of `call_id`: context, not draws."""

    call_id: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class CallTokens:
    """The tokens of a call, stored as a difference to its parent (proxy -> store, tree)."""

    prefix_length: int
    """Of the parent's `prompt_ids + completion_ids`, how many stand at the head of this prompt; 0 without parent."""
    suffix_ids: tuple[int, ...]
    """The rest of the prompt: `prompt_ids = (parent's tokens)[:prefix_length] + suffix_ids`."""
    completion_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    """Aligned with `completion_ids`."""
    weight_versions: tuple[VersionSpan, ...]
    grafts: tuple[Graft, ...] = ()
    """Every recorded reply that this prompt repeats, in order of position."""
    reencoded_replies: int = 0
    """Recorded replies in this history that could not be grafted and were encoded again: 0, or a defect to look at."""


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One model request and its reply, as the proxy recorded it (proxy -> store, tree)."""

    call_id: int
    """Position in the rollout, from 0, in order of arrival."""
    parent_id: int | None
    """The earlier call whose tokens this prompt extends the furthest."""
    conversation_id: int
    """Calls that continue one another share it: the id of the first of them."""
    continues_id: int | None
    """The last earlier call whose sampled reply stands in this history; None for the first call of a conversation."""
    role: CallRole
    protocol: str
    headers: dict[str, str]
    """Only those from which the role was read."""
    new_messages: tuple[Message, ...]
    """The history after the reply of `continues_id`; all of it for the first call of a conversation."""
    tools: tuple[Tool, ...]
    """Empty when equal to the tools of `continues_id`."""
    tools_same: bool
    """The tools are those of `continues_id`."""
    requested: Sampling
    """What the harness asked for."""
    reply: Reply | None
    """None when the call was cancelled or failed before there was one; then `failure` says why."""
    tokens: CallTokens | None
    """None for a text-only record (oracle, API model), which RL refuses, and for a failed call."""
    usage: Usage
    received_at: float
    """Seconds since the epoch."""
    duration_s: float
    engine_s: float
    """Of `duration_s`, the wait for the engine."""
    delivered: bool
    """The whole reply was written to a connection that was still open."""
    failure: str = ""


# ---------------------------------------------------------------------------------------------------------------------
# Tasks and rollouts
# ---------------------------------------------------------------------------------------------------------------------

WORKSPACE_MOUNT = "/root/.openclaw/workspace"
"""Where ClawGym's reward scripts expect the workspace; both sandboxes present it there."""
SANDBOX_HOME = "/root"
"""HOME inside a sandbox: a throwaway directory of the rollout."""
TEARDOWN_S = 5.0
"""Of a rollout's deadline, what verification leaves for removing the workspace."""
LEAST_VERIFY_S = 3.0
"""A verifier needs a sandbox of its own, and an interpreter in it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one rollout. Reaching one is the outcome `limit` or `timeout`."""

    deadline_s: float = 120.0
    """Wall clock for the whole rollout, boot and teardown included (law 5)."""
    reserve_s: float = 20.0
    """Of `deadline_s`, kept for settle, verify and teardown: what these take, if all goes slowly."""
    settle_s: float = 2.0
    """How long calls may go on after the harness has ended, before they are cancelled."""
    max_calls: int = 50
    max_sampled_tokens: int = 32_000
    max_live_leaves: int = 8
    """Live leaves of one conversation, after dead leaves and roles are dropped; more is `over_branched` (law 4)."""

    def __post_init__(self) -> None:
        at_least(self, deadline_s=1, settle_s=0, max_calls=1, max_sampled_tokens=1, max_live_leaves=0)
        least_s = self.settle_s + LEAST_VERIFY_S + TEARDOWN_S
        if not self.reserve_s >= least_s:
            raise ValueError(
                f"reserve_s={self.reserve_s}: must be at least {least_s:g}: settle_s={self.settle_s}, "
                f"{LEAST_VERIFY_S:g} s for the verifier and {TEARDOWN_S:g} s for teardown"
            )
        if self.reserve_s >= self.deadline_s:
            raise ValueError(f"reserve_s={self.reserve_s}: must be less than deadline_s={self.deadline_s}")


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Instruction, initial workspace and verifier (tasks -> rollout)."""

    task_id: str
    instruction: str
    input_dir: str | None
    """Folder on the host whose content is copied into the workspace; None for an empty one."""
    input_subdir: str = "."
    """Where below the workspace it is copied to."""
    reward_dir: str
    """Folder on the host with `reward.sh` and its helpers. Never visible to the harness (law 7)."""
    workspace_mount: str = WORKSPACE_MOUNT
    """Where both sandboxes present the workspace."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """From the task's file, untouched."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How to start one harness in a sandbox (harness -> sandbox)."""

    argv: tuple[str, ...]
    """First element: an absolute path inside the sandbox."""
    env: dict[str, str]
    """The whole environment inside, but for HOME and PATH."""
    files: dict[str, str]
    """Written before the start: path below HOME -> content."""
    read_only: dict[str, str]
    """Install folders: host path -> path inside."""


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """How one command in a sandbox ended (sandbox -> rollout, verify)."""

    exit_code: int
    """128 + n for signal n; 124 when it ran out of time."""
    stdout_tail: str
    stderr_tail: str
    wall_s: float
    cpu_s: float
    """User and system time of every process of the command, measured inside; 0.0 when it was killed from outside."""
    timed_out: bool


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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the verifier said (verify -> rollout)."""

    reward: float
    """In [0, 1]."""
    breakdown: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.reward <= 1.0:
            raise ValueError(f"reward {self.reward} is not in [0, 1]")


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

    @property
    def trains(self) -> bool:
        """The reward of this rollout enters the baseline of its group."""
        return self.outcome in POLICY_OUTCOMES and self.verdict is not None


@dataclass(frozen=True, kw_only=True)
class WorkerUsage:
    """What a worker has cost so far (worker -> campaign). What its harnesses cost is in their rollouts."""

    own_cpu_s: float
    """CPU seconds of the worker's own process: proxy, rendering, rollouts."""
    engine_cpu_s: float


def rollout_id(key: GroupKey, sample: int) -> str:
    """The one id of sample `sample` of group `key`; a retry of the same plan has the same (law 8)."""
    return f"{key.phase}-{key.step:06d}-{key.name}-{sample:03d}"


# ---------------------------------------------------------------------------------------------------------------------
# The policy
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Ids and the learner's own log-probs for them, which `serve` compares with the engine's after each load."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Aligned with `token_ids[1:]`: log-prob of each token given those before it, temperature 1."""
    tolerance: float
    """Largest mean absolute difference at which an engine in the learner's own precision still holds the same weights.

    `serve` allows more where the engine computes in a coarser one.
    """


@dataclass(frozen=True, kw_only=True)
class PolicyVersion:
    """One published set of weights (learner -> serve): a Hugging Face folder with `policy.json` beside the weights."""

    step: int
    path: str
    digest: str
    """SHA-256 over the weight files."""
    renderer: str
    """Name of the `renderers` configuration, e.g. `qwen3`."""
    thinking: bool
    """Whether the generation prompt leaves room for reasoning."""
    probe: Probe
