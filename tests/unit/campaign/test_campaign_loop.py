"""What a campaign plans, and how it reads what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.campaign.collect import check_verdicts
from clawhpc.campaign.install import PolicySource
from clawhpc.campaign.loop import Campaign, choose_heldout, cpu_by_part, make_plan
from clawhpc.campaign.settings import CampaignSettings
from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import LaunchError, UserError
from clawhpc.learner.settings import LearnerSettings
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord, StepPlan
from clawhpc.store import publish_rollout
from clawhpc.tasks.mix import Mix
from clawhpc.tasks.sets import TaskSets
from tests.fakes.records import make_group, make_record, make_task


class Recorder:
    """A collector that notes the plans and collects nothing."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def collect(self, plan: StepPlan) -> list[RolloutRecord]:
        self.plans.append(plan)
        return [make_record(group, sample) for group in plan.groups for sample in range(group.num_samples)]


TASKS = TaskSets(
    train=tuple(make_task(f"t{index}") for index in range(8)),
    heldout=tuple(make_task(f"h{index}") for index in range(4)),
)


def campaign_of(
    tmp_path: Path,
    collector: Recorder,
    harnesses: Sequence[str] = ("pi",),
    tasks: TaskSets = TASKS,
    mix: Mix = "turns",
    **changes: object,
) -> Campaign:
    settings = replace(CampaignSettings(groups_per_step=2, samples_per_group=3), **changes)
    paths, ledger = RunPaths(tmp_path), None  # which only Weights & Biases takes
    return Campaign(
        settings,
        paths=paths,
        collector=collector,  # type: ignore[arg-type]
        ledger=ledger,  # type: ignore[arg-type]
        tasks=tasks,
        harnesses=harnesses,
        mix=mix,
    )


def test_a_step_is_planned_the_same_again_and_differently_from_others(tmp_path: Path) -> None:
    collector = Recorder()
    campaign = campaign_of(tmp_path, collector)
    for step in (0, 1, 0):
        campaign.collect(step)
    first, second, again = collector.plans
    assert first == again
    assert {group.key.task_id for group in first.groups}.isdisjoint(group.key.task_id for group in second.groups)
    assert (first.policy_step, second.policy_step) == (0, 1)
    assert first.num_rollouts == 6


def test_no_two_rollouts_of_a_campaign_are_drawn_with_the_same_seed(tmp_path: Path) -> None:
    collector = Recorder()
    campaign = campaign_of(tmp_path, collector)
    for step in range(20):
        campaign.collect(step)
    seeds = [group.seed + at for plan in collector.plans for group in plan.groups for at in range(group.num_samples)]
    assert len(set(seeds)) == len(seeds)


def test_evaluations_before_and_after_draw_the_same_tasks_with_the_same_seeds(tmp_path: Path) -> None:
    collector = Recorder()
    campaign = campaign_of(tmp_path, collector, harnesses=("pi", "claude_code"))
    campaign.evaluate(0)
    campaign.evaluate(9)
    before, after = collector.plans
    assert [group.seed for group in before.groups] == [group.seed for group in after.groups]
    assert [group.task for group in before.groups] == [group.task for group in after.groups]
    assert (before.policy_step, after.policy_step) == (0, 9)
    assert len(before.groups) == 8


def test_training_ends_when_its_minutes_are_over_those_before_a_resume_included(tmp_path: Path) -> None:
    campaign = campaign_of(tmp_path, Recorder(), train_min=1.0)
    assert campaign.collect(0) is not None
    metrics = RunPaths(tmp_path).metrics_csv
    metrics.parent.mkdir()
    metrics.write_text("step,time/collect_s,time/learn_s\n0,40.0,10.0\n")
    assert campaign.collect(1) is not None
    metrics.write_text("step,time/collect_s,time/learn_s\n0,40.0,10.0\n1,5.0,6.0\n")
    assert campaign.collect(1) is not None  # after a resume, step 1 is made again
    assert campaign.collect(2) is None


def test_a_step_that_needs_more_pairs_than_there_are_is_refused_before_anything_is_collected(tmp_path: Path) -> None:
    collector = Recorder()
    campaign = campaign_of(tmp_path, collector, groups_per_step=9)
    with pytest.raises(UserError, match=r"campaign\.groups_per_step=9: .*8 tasks to train on, with 1 harnesses"):
        campaign.run(LearnerSettings(), CreditSettings(), PolicySource(folder=tmp_path))
    assert collector.plans == []
    campaign.evaluate(0)
    assert len(collector.plans) == 1


def test_a_step_is_planned_in_the_way_that_is_chosen_and_refused_as_early_where_that_cannot_be(tmp_path: Path) -> None:
    collector = Recorder()
    campaign = campaign_of(tmp_path, collector, ("codex", "pi"), mix="each")
    campaign.collect(0)
    (plan,) = collector.plans
    assert len({group.key.task_id for group in plan.groups}) == 1
    assert {group.key.harness for group in plan.groups} == {"codex", "pi"}
    campaign = campaign_of(tmp_path, collector, ("codex", "pi"), mix="each", groups_per_step=3)
    with pytest.raises(UserError, match="multiple of 2"):
        campaign.run(LearnerSettings(), CreditSettings(), PolicySource(folder=tmp_path))
    assert len(collector.plans) == 1


def test_the_cpu_seconds_of_the_learner_are_those_of_this_campaign(tmp_path: Path) -> None:
    began_s = time.process_time()
    assert cpu_by_part(RunPaths(tmp_path), began_s)["learner"] <= time.process_time() - began_s


def test_how_many_tasks_are_evaluated_is_said_apart_from_the_harnesses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        campaign_of(tmp_path, Recorder(), harnesses=("pi", "claude_code")).evaluate(0)
    assert "pass@1 on 4 held-out tasks with pi and claude_code: 1.000" in caplog.text


def test_what_killed_writers_have_left_of_a_run_is_gone_when_it_has_finished(tmp_path: Path) -> None:
    campaign, group = campaign_of(tmp_path, Recorder()), make_group()
    publish_rollout(campaign.paths, make_record(group))
    kept = sorted(tmp_path.rglob("*"))
    (campaign.paths.group(group.key) / ".claim.1234.part").write_text("{half")
    campaign._finish(0, [], [])
    assert sorted(tmp_path.rglob("*")) == sorted([*kept, campaign.paths.finished])


def test_more_evaluation_tasks_than_are_held_out_are_refused() -> None:
    with pytest.raises(UserError, match=r"campaign\.eval_tasks=5: there are only 4"):
        choose_heldout(TASKS, 5)


@pytest.mark.parametrize(("eval_tasks", "expected"), [(None, 4), (3, 3), (0, 0)])
def test_all_held_out_tasks_are_evaluated_unless_fewer_are_asked_for(
    tmp_path: Path, eval_tasks: int | None, expected: int
) -> None:
    collector = Recorder()
    campaign_of(tmp_path, collector, tasks=replace(TASKS, heldout=choose_heldout(TASKS, eval_tasks))).evaluate(0)
    assert sum(len(plan.groups) for plan in collector.plans) == expected


def test_a_collection_in_which_everything_failed_ends_the_campaign_with_the_commonest_reason() -> None:
    group = make_group(num_samples=3)
    failed = [replace(make_record(group, sample, reward=None), detail="no bash") for sample in range(3)]
    with pytest.raises(LaunchError, match=r"all 3 rollouts failed; 3 of them with verifier_failed: no bash"):
        check_verdicts("train 0", failed)
    check_verdicts("train 0", [*failed, make_record(group, 2)])
    check_verdicts("train 0", [])


def test_a_plan_is_whole_in_itself() -> None:
    plan = make_plan("capture", 0, [(make_task("a"), "pi"), (make_task("b"), "pi")], num_samples=1)
    assert [group.task.task_id for group in plan.groups] == ["a", "b"]
    assert all(group.key.phase == "capture" for group in plan.groups)
