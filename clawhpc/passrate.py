"""Pass rates of evaluations, and what they took, with honest intervals. Pure numpy.

An evaluation draws n rollouts of each of T tasks, with one harness or with several. Rollouts of one task are not
independent of one another, under whatever harness, so every interval here is a percentile bootstrap over *tasks*; a
difference between two policies on the same tasks is *paired*: the same resampled tasks for both.

Nothing here depends on the order of the records.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from statistics import fmean

import numpy as np

from clawhpc.records import RolloutRecord, Usage

NUM_RESAMPLES = 10_000
"""Enough that the interval's own noise stays below its third digit."""
DRAWS_AT_ONCE = 1_000_000
"""Of tasks into resamples: 8 MB."""
BOOTSTRAP_SEED = 0
PASS_THRESHOLD = 1.0
"""A rollout passes when its reward reaches this."""
KS = (2, 4, 8, 16, 32, 64)
"""Of pass@k."""

Price = Callable[[Usage], float]
"""USD of one call."""
Pair = tuple[str, str]
"""Task and harness."""
Rates = Mapping[Pair, Mapping[str, float]]
"""Measures, by name, of each pair."""


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
    """What the rollouts of one policy say; every estimate is over those with a verdict, None where there is none."""

    num_tasks: int
    """Those with a verdict."""
    num_rollouts: int
    """Likewise."""
    num_failed: int
    """Rollouts that the infrastructure failed in every attempt; they count neither way."""
    num_retried: int
    """Those that it failed at first, whatever became of them."""
    outcomes: dict[str, int]
    """How all of them have ended."""
    mean_reward: Estimate | None
    pass_at_1: Estimate | None
    pass_at_k: dict[int, Estimate]
    """For k = 2, 4, 8, ... as far as every task has that many rollouts with each of its harnesses."""
    per_rollout: dict[str, Estimate]
    """What a rollout takes: see `EFFORT`; where they are known, also `policy_usd` and `judge_usd`."""
    policy_usd: float | None
    """Of the calls of all rollouts, those without a verdict too; None without a price."""
    judge_usd: float | None
    """Of all that a judge was asked; None where nobody judged, or a cost is not known."""


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


def tabulate(records: Iterable[RolloutRecord], price: Price | None = None) -> PassTable:
    """The table of one evaluation, over all of its harnesses. `price`: of an API's calls."""
    records = sorted(records, key=lambda record: (record.key, record.sample))
    drawn = by_pair(records)
    fewest = min(map(len, drawn.values()), default=0)
    ks = [k for k in KS if k <= fewest]
    costs = known_costs(records, price)
    efforts = EFFORT | costs
    means = estimate({pair: rate(judged, ks) | mean_efforts(judged, efforts) for pair, judged in drawn.items()})
    num_rollouts = sum(map(len, drawn.values()))
    return PassTable(
        num_tasks=len({task_id for task_id, _ in drawn}),
        num_rollouts=num_rollouts,
        num_failed=len(records) - num_rollouts,
        num_retried=sum(record.num_attempts > 1 for record in records),
        outcomes=dict(Counter(str(record.outcome) for record in records)),
        mean_reward=means.get("reward"),
        pass_at_1=means.get("pass@1"),
        pass_at_k={k: means[f"pass@{k}"] for k in ks},
        per_rollout={name: means[name] for name in efforts if drawn},
        policy_usd=total(costs.get("policy_usd"), records),
        judge_usd=total(costs.get("judge_usd"), records),
    )


def paired_difference(
    before: Iterable[RolloutRecord], after: Iterable[RolloutRecord], measure: str = "pass@1"
) -> Estimate:
    """`measure` of `paired_differences`: `pass@1` or `reward`."""
    return paired_differences(before, after)[measure]


def paired_differences(before: Iterable[RolloutRecord], after: Iterable[RolloutRecord]) -> dict[str, Estimate]:
    """`pass@1` and `reward`, after minus before, over the tasks and harnesses that both have, paired by them.

    ValueError when they have none in common.
    """
    return difference(_rates(before), _rates(after))


def difference(before: Rates, after: Rates) -> dict[str, Estimate]:
    """Of each measure, after minus before, over the pairs that both have. ValueError when they have none in common."""
    shared = before.keys() & after.keys()
    if not shared:
        raise ValueError(
            "no task has a verdict with the same harness in both evaluations: "
            f"{len(before)} have one before, {len(after)} after"
        )
    return estimate(
        {pair: {measure: value - before[pair][measure] for measure, value in after[pair].items()} for pair in shared}
    )


def _rates(records: Iterable[RolloutRecord]) -> dict[Pair, dict[str, float]]:
    return {pair: rate(judged) for pair, judged in by_pair(records).items()}


def by_pair(records: Iterable[RolloutRecord]) -> dict[Pair, list[RolloutRecord]]:
    """The rollouts that have a verdict."""
    pairs: dict[Pair, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        if record.verdict is not None:
            pairs[record.key.task_id, record.key.harness].append(record)
    return dict(pairs)


def rate(records: Sequence[RolloutRecord], ks: Iterable[int] = ()) -> dict[str, float]:
    """Mean reward and pass rates of the rollouts of one pair, by what the verifier said before any shaping."""
    rewards = [record.verdict.raw_reward for record in records if record.verdict is not None]
    num_passed = sum(reward >= PASS_THRESHOLD for reward in rewards)
    return {
        "reward": fsum(rewards) / len(rewards),
        "pass@1": num_passed / len(rewards),
        **{f"pass@{k}": pass_at_k(len(rewards), num_passed, k) for k in ks},
    }


Effort = Callable[[RolloutRecord], float]

EFFORT: dict[str, Effort] = {
    "calls": lambda record: len(record.calls),
    "prompt_tokens": lambda record: sum(call.usage.input_tokens for call in record.calls),
    "cached_tokens": lambda record: sum(call.usage.cached_tokens for call in record.calls),
    "sampled_tokens": lambda record: sum(call.usage.output_tokens for call in record.calls),
    "wall_s": lambda record: record.timings.wall_s,
    "engine_wait_s": lambda record: fsum(call.engine_s for call in record.calls),
    "harness_cpu_s": lambda record: record.timings.harness_cpu_s,
}
"""Name -> what a rollout takes of it. Prompt tokens are those of every call, the cached ones among them; the wait for
the engine is the sum over calls, which may overlap.
"""


def mean_efforts(records: Sequence[RolloutRecord], efforts: Mapping[str, Effort]) -> dict[str, float]:
    """Of a rollout of one pair."""
    return {name: fsum(map(effort, records)) / len(records) for name, effort in efforts.items()}


def known_costs(records: Iterable[RolloutRecord], price: Price | None) -> dict[str, Effort]:
    """Name -> USD of a rollout. Only what is known of every one of them: no price is made up, nor what an endpoint has
    not counted.
    """
    records, costs = tuple(records), dict[str, Effort]()
    answered = [call for record in records for call in record.calls if not call.failure]
    if price is not None and all(call.usage.input_tokens > 0 for call in answered):
        costs["policy_usd"] = lambda record: fsum(price(call.usage) for call in record.calls)
    judgements = [record.verdict.judgement for record in records if record.verdict and record.verdict.judgement]
    if judgements and all(judgement.cost_usd is not None for judgement in judgements):
        costs["judge_usd"] = judge_usd
    return costs


def judge_usd(record: RolloutRecord) -> float:
    """What its judges have cost; 0 where nobody judged."""
    judgement = record.verdict.judgement if record.verdict else None
    return judgement.cost_usd or 0.0 if judgement else 0.0


def total(cost: Effort | None, records: Iterable[RolloutRecord]) -> float | None:
    """Over all rollouts."""
    return None if cost is None else fsum(map(cost, records))


def estimate(values: Rates) -> dict[str, Estimate]:
    """Name -> mean over tasks of what their harnesses give on average, with its interval; empty without any."""
    if not values:
        return {}
    by_task: dict[str, list[Iterable[float]]] = defaultdict(list)
    for pair in sorted(values):
        by_task[pair[0]].append(values[pair].values())
    values_TM = np.array([[fmean(column) for column in zip(*pairs, strict=True)] for pairs in by_task.values()])
    return dict(zip(next(iter(values.values())), _bootstrap(values_TM), strict=True))


def _bootstrap(values_TM: np.ndarray) -> list[Estimate]:
    """Of each of M measures its mean over T tasks, and the interval over resampled tasks, the same for all measures."""
    counts_RT = resample(len(values_TM))
    most = max(1, DRAWS_AT_ONCE // len(values_TM))
    starts = range(0, NUM_RESAMPLES, most)
    means_RM = np.concatenate([counts_RT[start : start + most] @ values_TM for start in starts]) / len(values_TM)
    low_M, high_M = np.percentile(means_RM, [2.5, 97.5], axis=0)
    columns = zip(values_TM.mean(axis=0), low_M, high_M, strict=True)
    return [Estimate(mean=float(mean), low=float(low), high=float(high)) for mean, low, high in columns]


@lru_cache(maxsize=2)
def resample(num_tasks: int) -> np.ndarray:
    """How often each resample draws each task, (resamples, tasks): the same for every evaluation on so many tasks."""
    generator = np.random.default_rng(BOOTSTRAP_SEED)
    most = max(1, DRAWS_AT_ONCE // num_tasks)
    counts_RT = np.empty((NUM_RESAMPLES, num_tasks), dtype=np.uint16)
    for start in range(0, NUM_RESAMPLES, most):
        rows_RT = counts_RT[start : start + most]
        picks_RT = generator.integers(0, num_tasks, size=rows_RT.shape)
        cells_RT = picks_RT + num_tasks * np.arange(len(rows_RT))[:, None]
        rows_RT[:] = np.bincount(cells_RT.ravel(), minlength=rows_RT.size).reshape(rows_RT.shape)
    return counts_RT
