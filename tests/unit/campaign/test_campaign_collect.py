"""A collection: it waits for workers, frees what the dead have claimed, and does not wait for ever."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clawhpc.campaign import collect
from clawhpc.campaign.collect import Collector
from clawhpc.errors import LaunchError
from clawhpc.paths import RunPaths
from clawhpc.records import GroupPlan, StepPlan
from clawhpc.store import claim_group, claim_owner, publish_rollout, read_rollouts, seal_group
from tests.fakes.late_view import LateView
from tests.fakes.records import make_group, make_record

STALL_MIN = 0.01


@dataclass
class FakePool:
    """Workers that collect one group each time somebody looks whether they are alive."""

    paths: RunPaths
    plan: StepPlan
    reward: float | None = 1.0
    lazy: bool = False
    looks: int = 0
    free: list[str | None] = field(default_factory=list)
    """Owner of the first group's claim, at each look."""

    def check(self) -> frozenset[str]:
        self.looks += 1
        self.free.append(claim_owner(self.paths, self.plan.groups[0].key))
        if not self.lazy and self.looks <= len(self.plan.groups):
            self.collect(self.plan.groups[self.looks - 1])
        return frozenset({"w1"})

    def collect(self, group: GroupPlan) -> None:
        for sample in range(group.num_samples):
            publish_rollout(self.paths, make_record(group, sample, self.reward))
        seal_group(self.paths, group)

    def logs(self) -> str:
        return "worker logs: here"


def plan_of(*tasks: str) -> StepPlan:
    groups = tuple(make_group(task) for task in tasks)
    return StepPlan(phase="train", step=0, policy_step=0, temperature=1.0, groups=groups)


def test_a_plan_is_collected_and_comes_in_planned_order(tmp_path: Path) -> None:
    paths, plan = RunPaths(tmp_path), plan_of("b", "a")
    records = Collector(paths, FakePool(paths, plan), stall_min=1).collect(plan)  # type: ignore[arg-type]
    assert [(record.key.task_id, record.sample) for record in records] == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]


def test_what_was_collected_before_is_read_without_a_worker(tmp_path: Path) -> None:
    paths, plan = RunPaths(tmp_path), plan_of("a")
    Collector(paths, FakePool(paths, plan), stall_min=1).collect(plan)  # type: ignore[arg-type]
    again = FakePool(paths, plan, lazy=True)
    assert len(Collector(paths, again, stall_min=1).collect(plan)) == 2  # type: ignore[arg-type]
    assert again.looks == 0


def test_the_claims_of_dead_workers_are_freed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    paths, plan = RunPaths(tmp_path), plan_of("a", "b")
    claim_group(paths, plan.groups[0].key, "dead")
    claim_group(paths, plan.groups[1].key, "w1")
    pool = FakePool(paths, plan, lazy=True)
    with pytest.raises(LaunchError):
        Collector(paths, pool, stall_min=STALL_MIN).collect(plan)  # type: ignore[arg-type]
    assert pool.free[:2] == ["dead", None]
    assert claim_owner(paths, plan.groups[1].key) == "w1"


def test_a_rollout_that_is_seen_later_than_its_groups_manifest_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where two hosts have written them: a learner would train without it, and a resume with it."""
    paths, plan = RunPaths(tmp_path), plan_of("a", "b")
    pool = FakePool(paths, plan, lazy=True)
    for group in plan.groups:
        pool.collect(group)
    LateView(monkeypatch, lambda path: path.name.endswith("-001.json"), num_looks=8)
    records = Collector(paths, pool, stall_min=1, poll_s=0.01).collect(plan)  # type: ignore[arg-type]
    assert [(record.key.task_id, record.sample) for record in records] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_a_collection_in_which_nothing_happens_ends_with_the_logs_to_read(tmp_path: Path) -> None:
    paths, plan = RunPaths(tmp_path), plan_of("a")
    pool = FakePool(paths, plan, lazy=True)
    with pytest.raises(LaunchError, match=r"no rollout has ended for 1 s; worker logs: here"):
        Collector(paths, pool, stall_min=STALL_MIN).collect(plan)  # type: ignore[arg-type]


def test_while_all_workers_are_in_the_queue_of_a_cluster_nothing_is_late_and_this_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class QueuedPool(FakePool):
        def check(self) -> frozenset[str]:
            self.looks += 1
            if time.monotonic() - began < 2 * 60 * STALL_MIN:
                return frozenset()
            self.collect(self.plan.groups[0])
            return frozenset({"w1"})

    monkeypatch.setattr(collect, "LOG_EVERY_S", 0.1)
    paths, plan, began = RunPaths(tmp_path), plan_of("a"), time.monotonic()
    with caplog.at_level(logging.INFO):
        records = Collector(paths, QueuedPool(paths, plan), STALL_MIN, poll_s=0.01).collect(plan)  # type: ignore[arg-type]
    assert len(records) == 2
    assert re.search(r"train 0: 0/2 rollouts in \d s; no worker is at work", caplog.text)


def test_a_collection_in_which_everything_failed_is_set_aside_and_collected_again(tmp_path: Path) -> None:
    paths, plan = RunPaths(tmp_path), plan_of("a")
    broken = Collector(paths, FakePool(paths, plan, reward=None), stall_min=1)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="all 2 rollouts failed"):
        broken.collect(plan)
    assert list(read_rollouts(paths)) == []
    assert len(list((paths.set_aside / "train-000000-1").glob("*/*.json"))) == 3
    mended = Collector(paths, FakePool(paths, plan), stall_min=1)  # type: ignore[arg-type]
    assert all(record.trains for record in mended.collect(plan))
