"""Pass rates of evaluations, with honest intervals. Pure numpy.

An evaluation draws n rollouts of each of T tasks. Rollouts of one task are not independent of one another, so every
interval here is a percentile bootstrap over *tasks*; a difference between two policies on the same tasks is *paired*:
the same resampled tasks for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from clawhpc.records import RolloutRecord

NUM_RESAMPLES = 10_000
"""Enough that the interval's own noise stays below its third digit."""
BOOTSTRAP_SEED = 0
PASS_THRESHOLD = 1.0
"""A rollout passes when its reward reaches this."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class PassTable:
    """What one evaluation says."""

    num_tasks: int
    num_rollouts: int
    """Those with a verdict."""
    num_failed: int
    """Those that the infrastructure failed; they count neither way."""
    mean_reward: Estimate
    pass_at_1: Estimate
    pass_at_k: Mapping[int, Estimate]
    """For k = 2, 4, 8, ... as far as every task has that many rollouts."""


def pass_at_k(num_rollouts: int, num_passed: int, k: int) -> float:
    """Chance that at least one of k rollouts passes, unbiased (Chen et al. 2021, arXiv 2107.03374, section 2.1)."""
    if k > num_rollouts:
        raise ValueError(f"pass@{k} needs at least {k} rollouts of each task, and there are {num_rollouts}")
    num_missed = num_rollouts - num_passed
    if num_missed < k:
        return 1.0
    misses = np.arange(num_missed - k + 1, num_missed + 1)
    draws = np.arange(num_rollouts - k + 1, num_rollouts + 1)
    return float(1.0 - np.prod(misses / draws))


def rewards_by_task(records: Iterable[RolloutRecord]) -> dict[str, list[float]]:
    """Task and harness -> rewards of the rollouts that have a verdict."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if record.verdict is not None:
            rewards[f"{record.key.task_id} @ {record.key.harness}"].append(record.verdict.reward)
    return dict(rewards)


def _bootstrap(values_T: np.ndarray) -> Estimate:
    """Mean over tasks and its percentile interval over resampled tasks."""
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    picks_RT = generator.integers(0, len(values_T), size=(NUM_RESAMPLES, len(values_T)))
    low, high = np.percentile(values_T[picks_RT].mean(axis=1), [2.5, 97.5])
    return Estimate(mean=float(values_T.mean()), low=float(low), high=float(high))


def tabulate(records: Iterable[RolloutRecord]) -> PassTable:
    """The pass rates of one evaluation. ValueError when no rollout has a verdict."""
    records = list(records)
    rewards = rewards_by_task(records)
    if not rewards:
        raise ValueError(f"none of {len(records)} rollouts has a verdict: nothing to evaluate")
    counts = [(len(task), sum(reward >= PASS_THRESHOLD for reward in task)) for task in rewards.values()]
    fewest = min(num for num, _ in counts)
    ks = [k for k in (2, 4, 8, 16, 32, 64) if k <= fewest]
    num_rollouts = sum(num for num, _ in counts)
    return PassTable(
        num_tasks=len(rewards),
        num_rollouts=num_rollouts,
        num_failed=len(records) - num_rollouts,
        mean_reward=_bootstrap(np.array([np.mean(task) for task in rewards.values()])),
        pass_at_1=_bootstrap(np.array([passed / num for num, passed in counts])),
        pass_at_k={k: _bootstrap(np.array([pass_at_k(num, passed, k) for num, passed in counts])) for k in ks},
    )


def paired_difference(before: Iterable[RolloutRecord], after: Iterable[RolloutRecord]) -> Estimate:
    """Difference in pass@1 (after minus before) over the tasks that both have, paired by task."""
    rewards_before, rewards_after = rewards_by_task(before), rewards_by_task(after)
    shared = sorted(rewards_before.keys() & rewards_after.keys())
    if not shared:
        raise ValueError("the two evaluations share no task")
    passed = [
        np.mean(np.array(rewards_after[task]) >= PASS_THRESHOLD)
        - np.mean(np.array(rewards_before[task]) >= PASS_THRESHOLD)
        for task in shared
    ]
    return _bootstrap(np.array(passed))
