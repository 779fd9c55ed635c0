"""The frozen types that cross boundaries between parts. No torch, no I/O, no clock.

Every sequence is a tuple and every type is keyword-only, so that a record can be hashed into a digest, shared between
threads, and written by `msgspec` as it stands. Text views (`Message`, `Reply`) are for harnesses, verifiers and people;
reinforcement learning trains on the ids in `Generation` and `CallRecord` only (law 1).
"""

from __future__ import annotations

from clawhpc.records.call import CallRecord, CallRole, CallTokens, Generation, Graft, VersionSpan
from clawhpc.records.conversation import (
    Conversation,
    FinishReason,
    Message,
    MessageRole,
    Reply,
    Sampling,
    Tool,
    ToolCall,
    Usage,
)
from clawhpc.records.judgement import Judgement, Opinion
from clawhpc.records.mcp import McpCall
from clawhpc.records.policy import PolicyVersion, Probe
from clawhpc.records.rollout import (
    MACHINE_OUTCOMES,
    POLICY_OUTCOMES,
    EngineTime,
    FailedAttempt,
    GroupKey,
    GroupPlan,
    Outcome,
    Phase,
    RolloutRecord,
    StepPlan,
    Timings,
    Verdict,
    WorkerUsage,
    rollout_id,
)
from clawhpc.records.task import (
    LEAST_VERIFY_S,
    MCP_MOUNT,
    RUN_MCP_MOUNT,
    SANDBOX_HOME,
    TEARDOWN_S,
    WORKSPACE_MOUNT,
    Criterion,
    ExecResult,
    LaunchPlan,
    LaunchRequest,
    Limits,
    McpServer,
    Rubric,
    ScriptCheck,
    TaskImage,
    TaskSpec,
    Verifier,
)

__all__ = [
    "LEAST_VERIFY_S",
    "MACHINE_OUTCOMES",
    "MCP_MOUNT",
    "POLICY_OUTCOMES",
    "RUN_MCP_MOUNT",
    "SANDBOX_HOME",
    "TEARDOWN_S",
    "WORKSPACE_MOUNT",
    "CallRecord",
    "CallRole",
    "CallTokens",
    "Conversation",
    "Criterion",
    "EngineTime",
    "ExecResult",
    "FailedAttempt",
    "FinishReason",
    "Generation",
    "Graft",
    "GroupKey",
    "GroupPlan",
    "Judgement",
    "LaunchPlan",
    "LaunchRequest",
    "Limits",
    "McpCall",
    "McpServer",
    "Message",
    "MessageRole",
    "Opinion",
    "Outcome",
    "Phase",
    "PolicyVersion",
    "Probe",
    "Reply",
    "RolloutRecord",
    "Rubric",
    "Sampling",
    "ScriptCheck",
    "StepPlan",
    "TaskImage",
    "TaskSpec",
    "Timings",
    "Tool",
    "ToolCall",
    "Usage",
    "Verdict",
    "Verifier",
    "VersionSpan",
    "WorkerUsage",
    "rollout_id",
]
