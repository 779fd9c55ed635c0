"""Pass rates of evaluations, with honest intervals. Pure numpy.

An evaluation draws n rollouts of each of T tasks, with one harness or with several. Rollouts of one task are not
independent of one another, under whatever harness, so every interval here is a percentile bootstrap over *tasks*; a
difference between two policies on the same tasks is *paired*: the same resampled tasks for both.
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
    """Those that the infrastructure failed in every attempt; they count neither way."""
    num_retried: int
    """Those that it failed at first, whatever became of them."""
    mean_reward: Estimate
    pass_at_1: Estimate
    pass_at_k: Mapping[int, Estimate]
    """For k = 2, 4, 8, ... as far as every task has that many rollouts with each of its harnesses."""


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


Cell = tuple[str, str]
"""Task and harness."""


def rewards_by_cell(records: Iterable[RolloutRecord]) -> dict[Cell, list[float]]:
    """Rewards of the rollouts that have a verdict."""
    rewards: dict[Cell, list[float]] = defaultdict(list)
    for record in records:
        if record.verdict is not None:
            rewards[record.key.task_id, record.key.harness].append(record.verdict.reward)
    return dict(rewards)


def _estimate(values: Mapping[Cell, float]) -> Estimate:
    """Mean over tasks of what its harnesses give on average, and its interval."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for (task_id, _), value in values.items():
        by_task[task_id].append(value)
    return _bootstrap(np.array([np.mean(cells) for cells in by_task.values()]))


def _bootstrap(values_T: np.ndarray) -> Estimate:
    """Mean over tasks and its percentile interval over resampled tasks."""
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    picks_RT = generator.integers(0, len(values_T), size=(NUM_RESAMPLES, len(values_T)))
    low, high = np.percentile(values_T[picks_RT].mean(axis=1), [2.5, 97.5])
    return Estimate(mean=float(values_T.mean()), low=float(low), high=float(high))


def tabulate(records: Iterable[RolloutRecord]) -> PassTable:
    """The pass rates of one evaluation. ValueError when no rollout has a verdict."""
    records = list(records)
    rewards = rewards_by_cell(records)
    if not rewards:
        raise ValueError(f"none of {len(records)} rollouts has a verdict: nothing to evaluate")
    counts = {cell: (len(drawn), _count_passed(drawn)) for cell, drawn in rewards.items()}
    fewest = min(num for num, _ in counts.values())
    ks = [k for k in (2, 4, 8, 16, 32, 64) if k <= fewest]
    num_rollouts = sum(num for num, _ in counts.values())
    return PassTable(
        num_tasks=len({task_id for task_id, _ in rewards}),
        num_rollouts=num_rollouts,
        num_failed=len(records) - num_rollouts,
        num_retried=sum(record.num_attempts > 1 for record in records),
        mean_reward=_estimate({cell: sum(drawn) / len(drawn) for cell, drawn in rewards.items()}),
        pass_at_1=_estimate({cell: passed / num for cell, (num, passed) in counts.items()}),
        pass_at_k={
            k: _estimate({cell: pass_at_k(num, passed, k) for cell, (num, passed) in counts.items()}) for k in ks
        },
    )


def paired_difference(before: Iterable[RolloutRecord], after: Iterable[RolloutRecord]) -> Estimate:
    """Difference in pass@1 (after minus before) over the tasks and harnesses that both have, paired by them.

    ValueError when they have none in common.
    """
    rates_before, rates_after = _pass_rates(before), _pass_rates(after)
    shared = sorted(rates_before.keys() & rates_after.keys())
    if not shared:
        raise ValueError(
            "no task has a verdict with the same harness in both evaluations: "
            f"{len(rates_before)} have one before, {len(rates_after)} after"
        )
    return _estimate({cell: rates_after[cell] - rates_before[cell] for cell in shared})


def _pass_rates(records: Iterable[RolloutRecord]) -> dict[Cell, float]:
    return {cell: _count_passed(drawn) / len(drawn) for cell, drawn in rewards_by_cell(records).items()}


def _count_passed(rewards: Iterable[float]) -> int:
    return sum(reward >= PASS_THRESHOLD for reward in rewards)
