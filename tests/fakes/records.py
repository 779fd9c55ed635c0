"""Records with the least in them, for tests that look at one field."""

from __future__ import annotations

from pathlib import Path

from clawhpc.records import (
    CallRecord,
    CallRole,
    GroupKey,
    GroupPlan,
    Judgement,
    Opinion,
    Outcome,
    Phase,
    Reply,
    RolloutRecord,
    Sampling,
    ScriptCheck,
    TaskSpec,
    Timings,
    Usage,
    Verdict,
    Verifier,
    rollout_id,
)


def script_verifier(folder: Path | str) -> Verifier:
    """A reward.sh in `folder`."""
    return Verifier(script=ScriptCheck(folder=str(folder)))


def reward_folder(task: TaskSpec) -> str:
    """Where its script lies on the host."""
    assert task.verifier.script is not None
    return task.verifier.script.folder


def make_task(task_id: str = "task") -> TaskSpec:
    return TaskSpec(task_id=task_id, instruction="do it", input_dir=None, verifier=script_verifier("/tasks/reward"))


def make_group(
    task_id: str = "task",
    *,
    phase: Phase = "train",
    step: int = 0,
    harness: str = "pi",
    num_samples: int = 2,
    task: TaskSpec | None = None,
) -> GroupPlan:
    key = GroupKey(phase=phase, step=step, task_id=task_id, harness=harness)
    return GroupPlan(key=key, task=task or make_task(task_id), num_samples=num_samples, seed=7)


def make_judgement(reason: str = "half of it") -> Judgement:
    """Two opinions of one criterion; only the first has a reason."""
    opinion = Opinion(model="judge-1", scores={"right": 0.5}, reasons={"right": reason})
    return Judgement(
        opinions=(opinion, Opinion(model="judge-2", scores={"right": 1.0})),
        score=0.75,
        agreement=0.5,
        spread={"right": 0.5},
        prompt_digest="ab" * 32,
        num_requests=3,
        usage=Usage(input_tokens=100, output_tokens=20),
        cost_usd=None,
    )


def make_record(
    group: GroupPlan,
    sample: int = 0,
    reward: float | None = 1.0,
    *,
    calls: tuple[CallRecord, ...] = (),
    outcome: Outcome | None = None,
) -> RolloutRecord:
    """A rollout of `group`; without reward it is a failure of the verifier."""
    natural = Outcome.VERIFIER_FAILED if reward is None else Outcome.COMPLETED
    return RolloutRecord(
        rollout_id=rollout_id(group.key, sample),
        key=group.key,
        sample=sample,
        seed=group.seed + sample,
        temperature=1.0,
        instruction=group.task.instruction,
        calls=calls,
        outcome=outcome or natural,
        detail="",
        verdict=None if reward is None else Verdict(reward=reward),
        exec_result=None,
        timings=Timings(started_at=0.0),
        worker_id="w0",
    )


def make_call(call_id: int, reply: Reply | None) -> CallRecord:
    """Without tools and tokens."""
    return CallRecord(
        call_id=call_id,
        parent_id=None,
        conversation_id=0,
        continues_id=None,
        role=CallRole.MAIN,
        protocol="anthropic",
        headers={},
        new_messages=(),
        tools=(),
        tools_same=False,
        requested=Sampling(),
        reply=reply,
        tokens=None,
        usage=Usage(input_tokens=0, output_tokens=0),
        received_at=0.0,
        duration_s=0.0,
        engine_s=0.0,
        delivered=True,
    )
