"""Advantages of the GRPO family: how much better a rollout did than the others of its (task, harness) group.

    GRPO     A_i = (r_i - mean(r)) / (std(r) + eps)      DeepSeekMath, arXiv 2402.03300, section 4.1
    Dr.GRPO  A_i =  r_i - mean(r)                        arXiv 2503.20783, section 3

Mean and std (unbiased) run over rollouts, never over rows or tokens, so a rollout that branches weighs no more than one
that does not. Rollouts that failed for reasons of the infrastructure, and those that over-branched, are left out before
the mean is taken (law 6). Where calls of other roles train beside main, each such role has a baseline of its own, over
the rollouts of the group that used it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from clawhpc.credit.settings import CreditSettings
from clawhpc.records import CallRole, GroupKey, RolloutRecord

MIN_SPREAD = 1e-6
"""Rewards that differ by less count as equal: the rest is rounding, and dividing by it would make a signal of it."""


class SkipReason(StrEnum):
    """Why a group gives no gradient."""

    TOO_FEW = "too_few"
    """Fewer than two rollouts that train."""
    NO_SPREAD = "no_spread"
    """All rewards equal."""


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What one step's rollouts are worth (credit -> learner), and the counts that a step logs."""

    advantages: dict[str, float]
    """rollout_id -> the advantage of each of its sampled tokens. Skipped and discarded rollouts are not in it."""
    num_groups: int
    skipped_groups: dict[str, int]
    """`SkipReason` -> groups."""
    discarded_rollouts: dict[str, int]
    """`Outcome` -> rollouts that were left out of baseline and gradient."""
    reward_mean: float
    """Over every rollout that trains, those of skipped groups included; 0 where there is none."""
    reward_std: float
    advantage_std: float
    """Spread of `advantages`; 0 says that this step can teach nothing."""

    def log_values(self, role: CallRole = CallRole.MAIN) -> dict[str, float]:
        """Flat names and numbers for a logger; every skip reason is always there, so that curves have no holes.

        Those of another role than main have a name of their own.
        """
        part = _log_part(role)
        return {
            **self.reward_values(role),
            **{f"{part}/skipped_{reason}": float(self.skipped_groups.get(reason, 0)) for reason in SkipReason},
            f"{part}/advantage_std": self.advantage_std,
        }

    def reward_values(self, role: CallRole = CallRole.MAIN) -> dict[str, float]:
        """Those of `log_values` that say nothing of baselines: all there is where advantages come from a critic."""
        part = _log_part(role)
        return {
            f"{part}/groups": float(self.num_groups),
            f"{part}/discarded_rollouts": float(sum(self.discarded_rollouts.values())),
            f"{part}/reward_mean": self.reward_mean,
            f"{part}/reward_std": self.reward_std,
        }


def credit_roles(
    rollouts: Iterable[RolloutRecord], settings: CreditSettings, drawn_roles: Mapping[str, Container[CallRole]]
) -> dict[CallRole, Credit]:
    """The credit of each role that trains. `drawn_roles`: rollout_id -> the roles of its calls that are live.

    That of main is `credit_groups` of all rollouts, whatever else trains. For another role it is that of the rollouts
    that have a live call of it: each call carries its rollout's reward, measured against those of the others.
    """
    everyone = list(rollouts)
    of_role = {CallRole.MAIN: credit_groups(everyone, settings)}
    for role in sorted(settings.trained_roles - {CallRole.MAIN}):
        used = [member for member in everyone if role in drawn_roles.get(member.rollout_id, ())]
        of_role[role] = credit_groups(used, settings)
    return of_role


def credit_groups(rollouts: Iterable[RolloutRecord], settings: CreditSettings | None = None) -> Credit:
    """Advantages inside each group. Raises `ValueError` when a rollout comes twice: it would weigh twice."""
    settings = settings or CreditSettings()
    groups = group_rollouts(rollouts)
    advantages: dict[str, float] = {}
    skipped: Counter[str] = Counter()
    for members in groups.values():
        rewards = {member.rollout_id: reward_of(member) for member in members if member.trains}
        if (reason := _skip_reason(list(rewards.values()))) is not None:
            skipped[str(reason)] += 1
        else:
            advantages |= center_by_group(rewards, settings)
    everyone = [member for members in groups.values() for member in members]
    rewards_seen = [reward_of(member) for member in everyone if member.trains]
    return Credit(
        advantages=advantages,
        num_groups=len(groups),
        skipped_groups=dict(skipped),
        discarded_rollouts=dict(Counter(str(member.outcome) for member in everyone if not member.trains)),
        reward_mean=float(np.mean(rewards_seen)) if rewards_seen else 0.0,
        reward_std=_spread(rewards_seen),
        advantage_std=_spread(list(advantages.values())),
    )


def group_rollouts(rollouts: Iterable[RolloutRecord]) -> dict[GroupKey, list[RolloutRecord]]:
    """The rollouts by the group that they are compared in, each once."""
    groups: defaultdict[GroupKey, list[RolloutRecord]] = defaultdict(list)
    seen: set[str] = set()
    for rollout in rollouts:
        if rollout.rollout_id in seen:
            raise ValueError(f"rollout {rollout.rollout_id} comes twice: it would weigh twice in its baseline")
        seen.add(rollout.rollout_id)
        groups[rollout.key].append(rollout)
    return dict(groups)


def reward_of(rollout: RolloutRecord) -> float:
    """The verifier's reward of a rollout that trains."""
    assert rollout.verdict is not None, f"rollout {rollout.rollout_id} has no verdict"
    return rollout.verdict.reward


def center_by_group(rewards: Mapping[str, float], settings: CreditSettings) -> dict[str, float]:
    """The advantages of one group of at least two rollouts; both formulas are at the top of this file."""
    values = np.array(list(rewards.values()), dtype=np.float64)
    centered = values - values.mean()
    if settings.baseline == "grpo":
        centered /= values.std(ddof=1) + settings.std_epsilon
    return dict(zip(rewards, centered.tolist(), strict=True))


def _skip_reason(rewards: Sequence[float]) -> SkipReason | None:
    if len(rewards) < 2:
        return SkipReason.TOO_FEW
    return SkipReason.NO_SPREAD if max(rewards) - min(rewards) < MIN_SPREAD else None


def _log_part(role: CallRole) -> str:
    return "credit" if role is CallRole.MAIN else f"credit_{role}"


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values)) if values else 0.0
