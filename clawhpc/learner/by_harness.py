"""What the log says of each harness by itself, where several share the steps of a run: `train/<harness>/<what>`.

Outcomes, rewards and lengths are of the records, so that they cost the learner nothing; the gap between log-probs is
summed once per step, after its updates, by each rank over its own tokens.

Shapes: M tokens of the step that train, N those of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from clawhpc.credit.group import credit_groups
from clawhpc.credit.settings import CreditSettings
from clawhpc.credit.values import Mask, ValueCredit
from clawhpc.learner.batch import Draws
from clawhpc.learner.means import StepMeans, sum_of_trained
from clawhpc.passrate import PASS_THRESHOLD
from clawhpc.records import POLICY_OUTCOMES, RolloutRecord


def harness_metrics(records: Sequence[RolloutRecord], credit: CreditSettings) -> dict[str, float]:
    """Of the rollouts of a step. Shares of outcomes are of all that were planned; all else is of those that train."""
    names = sorted({record.key.harness for record in records})
    of_harness = {name: [record for record in records if record.key.harness == name] for name in names}
    return {
        f"train/{name}/{what}": value
        for name, members in of_harness.items()
        for what, value in _describe(members, credit).items()
    }


def _describe(members: Sequence[RolloutRecord], credit: CreditSettings) -> dict[str, float]:
    of_groups = credit_groups(members, credit)
    training = [member for member in members if member.trains]
    num_skipped = sum(of_groups.skipped_groups.values())
    described = {
        "reward": of_groups.reward_mean,
        "pass_rate": _mean([_passed(member) for member in training]),
        "calls": _mean([len(member.calls) for member in training]),
        "drawn_tokens": _mean([_num_drawn(member) for member in training]),
        "groups": float(of_groups.num_groups),
        "spread_share": 1.0 - num_skipped / of_groups.num_groups,
        **{f"{kind}_share": _mean([member.outcome is kind for member in members]) for kind in sorted(POLICY_OUTCOMES)},
        "left_out_share": _mean([not member.trains for member in members]),
    }
    return described if credit.needs_critic else described | {"advantage_std": of_groups.advantage_std}


def _passed(record: RolloutRecord) -> bool:
    return record.verdict is not None and record.verdict.raw_reward >= PASS_THRESHOLD


def _num_drawn(record: RolloutRecord) -> int:
    return sum(len(call.tokens.completion_ids) for call in record.calls if call.tokens is not None)


def advantages_by_harness(credited: ValueCredit, harness_M: Sequence[str], trains_M: Mask) -> dict[str, float]:
    """The spread of a critic's advantages over the tokens of each harness, whitened together where they are."""
    names_M = np.array(harness_M)
    return {
        f"train/{name}/advantage_std": float(credited.advantages[trains_M & (names_M == name)].std())
        for name in sorted(set(names_M[trains_M].tolist()))
    }


def add_gaps(total: StepMeans, draws: Draws, own_N: Tensor, harnesses: Sequence[str]) -> None:
    """Add |old - sampling| of the draws `own_N`, which are this rank's, for each of `harnesses`."""
    known = draws.at(own_N)
    assert known.harness is not None, "where harnesses are told apart"
    assert known.old_logprobs is not None, "after the updates"
    gap_N = (known.old_logprobs - known.sampling_logprobs).abs()
    for number, name in enumerate(harnesses):
        weight_N = known.token_weight * (known.harness == number)
        largest = torch.where(weight_N > 0, gap_N, 0).amax() if len(gap_N) else gap_N.sum()
        sums = {f"{name}/sampling_gap": sum_of_trained(gap_N, weight_N), f"{name}/sampling_gap_max": largest}
        total.add(sums, weight_N)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
