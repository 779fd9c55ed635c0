"""A rollout whose task has a rubric, with a judge behind a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from clawhpc.records import ExecResult, Outcome, RolloutRecord, TaskSpec, Verdict, Verifier
from clawhpc.rollout.run import run_rollout
from clawhpc.sandbox.base import SandboxCommand
from clawhpc.verify.judge import open_judge
from clawhpc.verify.settings import JudgeModel, JudgeSettings, ShapingSettings
from tests.fakes.judge_endpoint import RUBRIC, Answer, JudgeEndpoint, Says, failure, judge_endpoint, verdict
from tests.fakes.rollout import FakeSandbox, one_call, parts_of, plan_of, workspace_of

pytestmark = pytest.mark.anyio
TASK = TaskSpec(task_id="essay", instruction="Write it.", input_dir=None, verifier=Verifier(rubric=RUBRIC))


async def write_report(command: SandboxCommand) -> ExecResult:
    (workspace_of(command) / "report.md").write_text("It was DNS.")
    return await one_call(command)


@asynccontextmanager
async def judged(
    tmp_path: Path, *script: Answer | Says, shaping: ShapingSettings | None = None, **limits: float
) -> AsyncIterator[tuple[RolloutRecord, JudgeEndpoint, FakeSandbox]]:
    """A rollout of the task, its judge, and the sandbox in which it was."""
    sandbox = FakeSandbox(write_report)
    async with judge_endpoint(*script) as endpoint:
        models = {"one": JudgeModel(name="one", base_url=endpoint.url, api_key_env="KEY")}
        async with open_judge(JudgeSettings(models=models, backoff_s=0.0), {"KEY": "sk-secret"}) as judge:
            parts = replace(parts_of(tmp_path, sandbox, **limits), judge=judge, shaping=shaping or ShapingSettings())
            record = await run_rollout(plan_of(TASK), parts)
    assert list(tmp_path.iterdir()) == []
    yield record, endpoint, sandbox


async def test_the_verdict_of_a_judge_is_in_the_record_and_survives_the_store(tmp_path: Path) -> None:
    async with judged(tmp_path, verdict(1, 0)) as (record, endpoint, sandbox):
        assert record.outcome is Outcome.COMPLETED
        assert record.trains
        assert record.verdict is not None
        assert record.verdict.reward == 0.75
        assert "It was DNS." in endpoint.requests[0].user
        assert len(sandbox.commands) == 1, "a rubric alone needs no sandbox of its own"
    assert msgspec.json.decode(msgspec.json.encode(record), type=RolloutRecord).verdict == record.verdict


async def test_a_judge_that_fails_is_the_outcome_verifier_failed_and_trains_nothing(tmp_path: Path) -> None:
    async with judged(tmp_path, failure(500, "overloaded")) as (record, _, _):
        assert record.outcome is Outcome.VERIFIER_FAILED
        assert record.verdict is None
        assert not record.trains
        assert "judge one: status 500" in record.detail
        assert "overloaded" in record.detail


async def test_a_silent_judge_takes_no_more_than_the_rollouts_deadline(tmp_path: Path) -> None:
    slow = replace(verdict(1, 1), after_s=60.0)
    async with judged(tmp_path, slow, deadline_s=9.2, reserve_s=8.2) as (record, _, _):
        assert record.outcome is Outcome.VERIFIER_FAILED
        assert "gave no verdict within" in record.detail
        assert record.timings.wall_s < 9.2


async def test_what_trains_is_shaped_and_what_was_said_is_kept(tmp_path: Path) -> None:
    shaping = ShapingSettings(threshold=0.9, partial_credit=0.0)
    async with judged(tmp_path, verdict(1, 0.2), shaping=shaping) as (record, _, _):
        assert record.verdict is not None
        assert (record.verdict.reward, record.verdict.raw_reward) == (0.0, pytest.approx(0.8))


async def test_rubric_judge_and_key_are_never_in_the_harness_sandbox(tmp_path: Path) -> None:
    async with judged(tmp_path, verdict(1, 1)) as (record, endpoint, sandbox):
        seen = repr(sandbox.commands) + repr(record)
        for secret in ("sk-secret", endpoint.url, RUBRIC.expected, RUBRIC.criteria[0].text):
            assert secret not in seen


async def test_a_rubric_without_a_judge_is_a_failure_of_the_verifier(tmp_path: Path) -> None:
    record = await run_rollout(plan_of(TASK), parts_of(tmp_path, FakeSandbox(write_report)))
    assert record.outcome is Outcome.VERIFIER_FAILED
    assert "this worker no judge" in record.detail


def test_a_record_from_before_there_were_judges_reads_well() -> None:
    old = b'{"reward": 0.5, "breakdown": {}}'
    verdict_then = msgspec.json.decode(old, type=Verdict)
    assert (verdict_then.raw_reward, verdict_then.judgement) == (0.5, None)
