"""The verdict on what a harness left: by the task's script, by a judge, or by both; then shaped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
from anyio import to_thread

from clawhpc.errors import VerifierError, boundary, ungrouped
from clawhpc.records import CallRecord, CallRole, Judgement, TaskSpec, Verdict
from clawhpc.sandbox.base import Sandbox
from clawhpc.verify.judge import Judge
from clawhpc.verify.prompt import Case
from clawhpc.verify.score import mean_scores
from clawhpc.verify.script import verify_workspace
from clawhpc.verify.settings import JudgeSettings, ShapingSettings
from clawhpc.verify.shape import shape
from clawhpc.verify.show import show_workspace


async def verify(
    task: TaskSpec,
    workspace: Path,
    calls: Sequence[CallRecord],
    *,
    sandbox: Sandbox,
    judge: Judge | None,
    shaping: ShapingSettings,
    sandbox_id: str,
    timeout_s: float,
) -> Verdict:
    """The verdict on `workspace`, in which no process of the harness runs any more, within `timeout_s`.

    Script and judge work at the same time. The judge sees the workspace as the harness left it: what is shown is read
    before the script starts, which may write there. Raises `VerifierError` when one of the two gives no score, and
    `SandboxError` when the script's sandbox fails.
    """
    deadline = anyio.current_time() + timeout_s
    case = await show(task, workspace, calls, judge)
    scripted: Verdict | None = None
    judgement: Judgement | None = None

    def left_s() -> float:
        return max(1.0, deadline - anyio.current_time())

    async def run_script() -> None:
        nonlocal scripted
        scripted = await verify_workspace(task, workspace, sandbox, sandbox_id=sandbox_id, timeout_s=left_s())

    async def ask(judge: Judge, case: Case) -> None:
        nonlocal judgement
        judgement = await judge.judge(case, timeout_s=left_s())

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            if task.verifier.script is not None:
                tasks.start_soon(run_script)
            if judge is not None and case is not None:
                tasks.start_soon(ask, judge, case)
    return shape(combine(task, scripted, judgement), calls, shaping)


async def show(task: TaskSpec, workspace: Path, calls: Sequence[CallRecord], judge: Judge | None) -> Case | None:
    """What a judge is shown; None for a task without rubric. `VerifierError` where there is a rubric and no judge."""
    if task.verifier.rubric is None:
        return None
    if judge is None:
        raise VerifierError(f"{task.task_id} has a rubric, and this worker no judge")
    with boundary(VerifierError, f"showing the workspace of {task.task_id}"):
        lines = await to_thread.run_sync(show_workspace, task, workspace, judge.settings, abandon_on_cancel=True)
    return Case(
        rubric=task.verifier.rubric,
        instruction=task.instruction,
        workspace=tuple(lines),
        final_reply=final_reply(calls, judge.settings),
    )


def final_reply(calls: Sequence[CallRecord], settings: JudgeSettings) -> str | None:
    """What the main loop said last; None where that is not to be shown."""
    if not settings.final_reply:
        return None
    replies = (call.reply.text for call in reversed(calls) if call.reply is not None and call.role is CallRole.MAIN)
    return next(replies, "")


def combine(task: TaskSpec, scripted: Verdict | None, judgement: Judgement | None) -> Verdict:
    """The raw reward: the script's, the judge's, or (1 - w) script + w judge with w = `Verifier.rubric_weight`."""
    if judgement is None:
        assert scripted is not None, f"{task.task_id} has neither script nor rubric"
        return scripted
    named = {f"rubric/{name}": score for name, score in mean_scores(judgement.opinions).items()}
    parts = {"rubric": judgement.score, **named}
    if scripted is None:
        return Verdict(reward=judgement.score, breakdown=parts, judgement=judgement)
    parts |= {"script": scripted.reward, **{f"script/{name}": value for name, value in scripted.breakdown.items()}}
    weight = task.verifier.rubric_weight
    reward = (1.0 - weight) * scripted.reward + weight * judgement.score
    return Verdict(reward=min(1.0, reward), breakdown=parts, judgement=judgement)
