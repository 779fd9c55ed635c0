"""A worker lends its judge and the run's shaping to every rollout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import Responder
from clawhpc.records import GroupPlan, Limits, StepPlan, Verifier
from clawhpc.sandbox.by_image import Sandboxes
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.serve.settings import EngineSettings
from clawhpc.store import open_plans, publish_plan, read_rollouts
from clawhpc.verify.judge import open_judge
from clawhpc.verify.settings import JudgeModel, JudgeSettings, ShapingSettings, VerifySettings
from clawhpc.worker.run import Worker
from clawhpc.worker.settings import STOP_FILE, WorkerSettings, WorkerSpec
from tests.fakes.caller import policy
from tests.fakes.engine import FakeEngine, replies
from tests.fakes.judge_endpoint import RUBRIC, judge_endpoint, verdict
from tests.fakes.records import make_group, make_task
from tests.fakes.rollout import FakeHarness, FakeSandbox, one_call

pytestmark = pytest.mark.anyio


class AnsweringDesk:
    engine_cpu_s = 0.0

    async def make_ready(self, plan: StepPlan) -> None:
        pass

    async def recover(self) -> None:
        pass

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        return policy(FakeEngine(replies("one", "two")))


def spec_of(tmp_path: Path, verify: VerifySettings) -> WorkerSpec:
    return WorkerSpec(
        run_root=str(tmp_path / "run"),
        cache_dir=str(tmp_path),
        scratch_root=None,
        worker=WorkerSettings(concurrency=2, poll_s=0.01, max_attempts=1),
        engine=EngineSettings(),
        sandbox=SandboxSettings(),
        limits=Limits(deadline_s=60.0, reserve_s=30.0, settle_s=0.1),
        harnesses={},
        verify=verify,
    )


async def test_a_group_with_a_rubric_is_judged_and_its_rewards_are_shaped(tmp_path: Path) -> None:
    paths, scratch = RunPaths(tmp_path / "run"), tmp_path / "s"
    scratch.mkdir()
    task = replace(make_task(), verifier=Verifier(rubric=RUBRIC))
    plan = StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=(make_group(task=task),))
    publish_plan(paths, plan)
    stop = paths.workers / "w0" / STOP_FILE
    async with judge_endpoint(verdict(1, 0.5)) as endpoint:
        judge_settings = JudgeSettings(models={"one": JudgeModel(name="one", base_url=endpoint.url)})
        verify = VerifySettings(judge=judge_settings, shaping=ShapingSettings(threshold=0.8))
        async with open_judge(judge_settings, {}) as judge:
            worker = Worker(
                spec_of(tmp_path, verify),
                "w0",
                sandboxes=Sandboxes(FakeSandbox(one_call)),
                harnesses={"pi": FakeHarness()},
                desk=AnsweringDesk(),
                scratch=scratch,
                environment={},
                judge=judge,
            )
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(worker.work)
                    while open_plans(paths):
                        await anyio.sleep(0.01)
                    stop.parent.mkdir(parents=True, exist_ok=True)
                    stop.touch()
    verdicts = [record.verdict for record in read_rollouts(paths)]
    assert [one and (one.reward, one.raw_reward) for one in verdicts] == [(1.0, 0.875)] * 2
