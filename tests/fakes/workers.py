"""Workers without a machine: they take plans from the store as real ones do, and make up what comes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clawhpc.paths import RunPaths
from clawhpc.records import GroupPlan, RolloutRecord, StepPlan
from clawhpc.store import missing_samples, open_plans, publish_rollout, seal_group
from tests.fakes.records import make_record


class Killed(BaseException):
    """As SIGKILL: nothing that handles errors may handle it."""


@dataclass
class Fate:
    """Kills whoever passes the moment `kill_at`."""

    kill_at: int | None = None
    moments: int = 0

    def __call__(self) -> None:
        self.moments += 1
        if self.moments == self.kill_at:
            raise Killed


def draw_plain(plan: StepPlan, group: GroupPlan, sample: int) -> RolloutRecord:
    """A rollout that says nothing."""
    return make_record(group, sample)


@dataclass
class FakeWorkers:
    """A pool whose workers take up a plan one look after it is there, or when they are let."""

    paths: RunPaths
    draw: Callable[[StepPlan, GroupPlan, int], RolloutRecord] = draw_plain
    moment: Callable[[], None] = lambda: None
    """Passed before each rollout is published."""
    done: list[tuple[int, int]] = field(default_factory=list)
    """Step and PolicyVersion of the rollouts that they have published."""
    seen: set[int] = field(default_factory=set)
    """Steps whose plan was there at the last look."""

    def check(self) -> frozenset[str]:
        """One look at them."""
        steps = {plan.step for plan in open_plans(self.paths)}
        self.work(steps & self.seen)
        self.seen = steps
        return frozenset({"w1"})

    def work(self, steps: set[int] | None = None) -> None:
        """Work through the plans of `steps`, or all, in order."""
        for plan in open_plans(self.paths):
            if steps is None or plan.step in steps:
                for group in plan.groups:
                    self._collect(plan, group)

    def logs(self) -> str:
        return "worker logs: here"

    def _collect(self, plan: StepPlan, group: GroupPlan) -> None:
        for sample in missing_samples(self.paths, group):
            self.moment()
            publish_rollout(self.paths, self.draw(plan, group, sample))
            self.done.append((plan.step, plan.policy_step))
        seal_group(self.paths, group)
