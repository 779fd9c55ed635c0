"""Which of the plans that it finds a worker takes."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest

from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import Responder
from clawhpc.records import GroupPlan, StepPlan
from clawhpc.sandbox.by_image import Sandboxes
from clawhpc.store import open_plans, publish_plan, read_rollouts
from clawhpc.worker.run import Worker
from clawhpc.worker.settings import WorkerSettings
from tests.fakes.caller import policy
from tests.fakes.engine import FakeEngine
from tests.fakes.records import make_group
from tests.fakes.rollout import FakeHarness, FakeSandbox, one_call
from tests.fakes.slurm_worker import stub_spec

pytestmark = pytest.mark.anyio


@dataclass
class OneModel:
    """A desk that answers whatever it is asked, as that of an endpoint does."""

    engine_cpu_s: float = 0.0
    asked: set[int] = field(default_factory=set)
    """PolicyVersions for which it was to answer."""

    async def make_ready(self, plan: StepPlan) -> None:
        self.asked.add(plan.policy_step)

    async def recover(self) -> None:
        pass

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        return policy(FakeEngine(lambda prompt: "fine"))


@pytest.mark.parametrize(("policy_steps", "taken"), [(None, {0, 1}), ({1}, {1})])
async def test_a_plan_for_a_policy_that_others_are_to_answer_for_is_left_to_them(
    policy_steps: Set[int] | None, taken: Set[int], tmp_path: Path
) -> None:
    paths, desk = RunPaths(tmp_path), OneModel()
    quick = WorkerSettings(concurrency=1, poll_s=0.01, idle_min=0.01)
    worker = Worker(
        replace(stub_spec(tmp_path), worker=quick, policy_steps=policy_steps),
        "w0",
        sandboxes=Sandboxes(FakeSandbox(one_call)),
        harnesses={"pi": FakeHarness()},
        desk=desk,
        scratch=tmp_path,
        environment={},
    )
    plans = [
        StepPlan(
            phase="eval", step=step, policy_step=step, temperature=0.5, groups=(make_group(step=step, phase="eval"),)
        )
        for step in range(2)
    ]
    for plan in plans:
        publish_plan(paths, plan)
    with anyio.fail_after(60):
        await worker.work()
    left = [plan for plan in plans if plan.step not in taken]
    assert {record.key.step for record in read_rollouts(paths)} == desk.asked == taken
    assert open_plans(paths) == left
    assert not any(paths.group(group.key).exists() for plan in left for group in plan.groups), "nor is one claimed"
