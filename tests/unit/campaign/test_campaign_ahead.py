"""One step ahead: which policy draws which step, what is collected while the learner learns, what a kill changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from clawhpc.campaign.collect import Collector
from clawhpc.campaign.loop import Campaign
from clawhpc.campaign.settings import CampaignSettings
from clawhpc.errors import LaunchError
from clawhpc.learner.settings import LearnerSettings
from clawhpc.paths import RunPaths
from clawhpc.records import GroupPlan, RolloutRecord, StepPlan
from clawhpc.store import claim_group, claim_owner, drop_policies, published_steps, read_plans, read_rollouts
from clawhpc.tasks.sets import TaskSets
from tests.fakes.records import make_record, make_task
from tests.fakes.workers import FakeWorkers, Fate, Killed

NUM_STEPS = 3
SETTINGS = CampaignSettings(num_steps=NUM_STEPS, groups_per_step=2, samples_per_group=1)
TASKS = TaskSets(train=tuple(make_task(f"t{index}") for index in range(8)), heldout=())


@dataclass
class Process:
    """One life of a campaign: its loop, a learner that only publishes, and its workers."""

    paths: RunPaths
    max_staleness: int = 1
    settings: CampaignSettings = SETTINGS
    fate: Fate = field(default_factory=Fate)
    reward: float | None = 1.0
    minutes_per_step: float = 0.0
    learner: LearnerSettings = field(default_factory=LearnerSettings)

    def __post_init__(self) -> None:
        self.workers = FakeWorkers(self.paths, self._draw, self.fate)
        collector = Collector(self.paths, self.workers, stall_min=1, poll_s=0.0)  # type: ignore[arg-type]
        self.campaign = Campaign(
            self.settings,
            paths=self.paths,
            collector=collector,
            ledger=None,  # type: ignore[arg-type]
            tasks=TASKS,
            harnesses=("pi",),
            mix="turns",
        )
        self.paths.policy(0).mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Train to the end, from the first step without a checkpoint; the number of steps."""
        step = max((int(path.name) + 1 for path in self.paths.checkpoints.glob("*")), default=0)
        self._publish(step)
        while step < self.settings.num_steps and self.campaign.collect(step, self.max_staleness) is not None:
            self._learn(step)
            step += 1
        return step

    def _learn(self, step: int) -> None:
        """In the order in which the learner leaves its files; workers work as long as they have a plan."""
        self.fate()
        self.workers.work()
        self.fate()
        self._log(step)
        self.fate()
        self.paths.checkpoints.mkdir(exist_ok=True)
        if (step + 1) % self.learner.checkpoint_every == 0:
            (self.paths.checkpoints / str(step)).touch()
        self._publish(step + 1)

    def _publish(self, step: int) -> None:
        self.paths.policy(step).mkdir(exist_ok=True)
        self.fate()
        drop_policies(self.paths.policies, partial(self.learner.keeps_policy, newest=step))

    def _log(self, step: int) -> None:
        rows = "".join(f"{at},{60 * self.minutes_per_step},0.0\n" for at in range(step + 1))
        self.paths.metrics.mkdir(exist_ok=True)
        self.paths.metrics_csv.write_text(f"step,time/collect_s,time/learn_s\n{rows}")

    def _draw(self, plan: StepPlan, group: GroupPlan, sample: int) -> RolloutRecord:
        assert self.paths.policy(plan.policy_step).exists(), "a plan names a policy that is there"
        assert not self.paths.policy(plan.step + 1).exists(), "a step is collected before it is learned"
        return make_record(group, sample, self.reward)


@pytest.mark.parametrize(
    ("max_staleness", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])], ids=str
)
def test_each_step_is_drawn_by_the_policy_that_is_as_old_as_allowed(
    tmp_path: Path, max_staleness: int, expected: list[int]
) -> None:
    process = Process(RunPaths(tmp_path), max_staleness, replace(SETTINGS, num_steps=4))
    assert process.run() == 4
    assert [plan.policy_step for plan in read_plans(process.paths)] == expected


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_next_step_is_collected_while_this_one_is_learned_only_if_it_may_be_stale(
    tmp_path: Path, max_staleness: int
) -> None:
    process = Process(RunPaths(tmp_path), max_staleness)
    process.campaign.collect(0, max_staleness)
    assert process.workers.done == [(0, 0)] * 2, "nobody waits for the next step"
    process.workers.work()  # while the learner learns step 0
    assert process.workers.done[2:] == [(1, 0)] * 2 * max_staleness
    process.paths.policy(1).mkdir()
    process.campaign.collect(1, max_staleness)
    assert process.workers.done[2:] == [(1, 1 - max_staleness)] * 2


def test_the_last_step_begins_none(tmp_path: Path) -> None:
    process = Process(RunPaths(tmp_path))
    assert process.run() == NUM_STEPS
    assert [plan.step for plan in read_plans(process.paths)] == [0, 1, 2]


def files_of(paths: RunPaths) -> dict[str, bytes]:
    """All plans and rollouts."""
    found = (*paths.plans.glob("*"), *(paths.root / "rollouts").glob("*/*/*.json"))
    return {str(path.relative_to(paths.root)): path.read_bytes() for path in found}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_campaign_killed_at_any_moment_goes_on_with_the_same_plans_and_each_rollout_once(
    tmp_path: Path, max_staleness: int
) -> None:
    whole = Process(RunPaths(tmp_path / "whole"), max_staleness)
    whole.run()
    assert whole.fate.moments == 1 + NUM_STEPS * (2 + 4)
    for kill_at in range(1, whole.fate.moments + 1):
        paths = RunPaths(tmp_path / str(kill_at))
        killed = Process(paths, max_staleness, fate=Fate(kill_at))
        with pytest.raises(Killed):
            killed.run()
        again = Process(paths, max_staleness)
        assert again.run() == NUM_STEPS
        assert files_of(paths) == files_of(whole.paths)
        assert sorted(killed.workers.done + again.workers.done) == sorted(whole.workers.done)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_policy_that_a_plan_names_is_there_whenever_the_run_was_killed_and_few_others_are(
    tmp_path: Path, max_staleness: int
) -> None:
    learner = LearnerSettings(keep_policies=2, keep_policy_every=2, checkpoint_every=2, max_staleness=max_staleness)
    settings = replace(SETTINGS, num_steps=5, groups_per_step=1)
    whole = Process(RunPaths(tmp_path / "whole"), max_staleness, settings, learner=learner)
    assert whole.run() == 5
    newest = range(4 - max_staleness, 6)
    assert published_steps(whole.paths) == sorted({0, 2, *newest})
    for kill_at in range(1, whole.fate.moments + 1):
        paths = RunPaths(tmp_path / str(kill_at))
        with pytest.raises(Killed):
            Process(paths, max_staleness, settings, Fate(kill_at), learner=learner).run()
        assert Process(paths, max_staleness, settings, learner=learner).run() == 5, "which looks at each plan's policy"
        assert published_steps(paths) == published_steps(whole.paths)


@pytest.mark.parametrize("kill_at", [None, *range(1, 13)], ids=str)
def test_a_step_that_has_begun_when_time_is_over_is_trained_on_and_no_other_begins(
    tmp_path: Path, kill_at: int | None
) -> None:
    settings = replace(SETTINGS, num_steps=9, train_min=0.5)
    process = Process(RunPaths(tmp_path), settings=settings, fate=Fate(kill_at), minutes_per_step=1.0)
    if kill_at is not None:
        with pytest.raises(Killed):
            process.run()
        process = Process(RunPaths(tmp_path), settings=settings, minutes_per_step=1.0)
    assert process.run() == 2
    assert [plan.step for plan in read_plans(process.paths)] == [0, 1]
    assert len(list(read_rollouts(process.paths))) == 4


def test_what_goes_wrong_ahead_is_told_when_the_step_is_needed_and_the_step_is_collected_again(tmp_path: Path) -> None:
    process = Process(RunPaths(tmp_path))
    process.campaign.collect(0, 1)
    process.reward = None
    with pytest.raises(LaunchError, match="train 1: all 2 rollouts failed"):
        process.run()
    again = Process(RunPaths(tmp_path))
    assert again.run() == NUM_STEPS
    assert again.workers.done == [(1, 0)] * 2 + [(2, 1)] * 2


def test_what_dead_workers_had_of_the_next_step_is_free_when_it_begins(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    Process(paths).campaign.collect(0, 1)
    first, second = read_plans(paths)[1].groups
    claim_group(paths, first.key, "of a killed run")
    claim_group(paths, second.key, "w1")
    Process(paths).campaign.collect(0, 1)
    assert (claim_owner(paths, first.key), claim_owner(paths, second.key)) == (None, "w1")
