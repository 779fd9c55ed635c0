"""Credit of a step's tokens from a critic's values (PPO, arXiv 1707.06347): GAE in every rollout, then whitening.

Every rollout with a verdict has such credit: there is no baseline to compare it in, so no group is skipped.

Shapes: M tokens of the step, rollout after rollout, each in the order of its tree's `CallTree.draws`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from clawhpc.credit.gae import Floats, path_gae, tree_gae
from clawhpc.credit.group import MIN_SPREAD
from clawhpc.credit.settings import CreditSettings
from clawhpc.records import CallRole
from clawhpc.tree.conversation import Turn

Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

ESTIMATORS = {"path_gae": path_gae, "tree_gae": tree_gae}


@dataclass(frozen=True, kw_only=True)
class RewardedTurns:
    """The conversations of one rollout (learner -> credit)."""

    turns: tuple[Turn, ...]
    reward: float

    @property
    def num_tokens(self) -> int:
        """Drawn in it."""
        return sum(turn.stop - turn.start for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class ValueCredit:
    """What each token of a step is worth (credit -> learner)."""

    advantages: Floats
    """(M,) Whitened where that is asked for; one that does not train is then 0."""
    returns: Floats
    """(M,) What the critic should have said, in units of reward."""
    metrics: dict[str, float]
    """Names as they are logged; of returns, and of advantages before whitening."""


def credit_values(
    rollouts: Sequence[RewardedTurns], values_M: Floats, trains_M: Mask, settings: CreditSettings
) -> ValueCredit:
    """Advantage and return of each token; `values_M` are in units of reward.

    Credit flows through all tokens; whitening and metrics are of those in `trains_M` alone.
    """
    estimates = [
        ESTIMATORS[settings.estimator](
            rollout.turns, values_M[at], rollout.reward, gamma=settings.gamma, gae_lambda=settings.gae_lambda
        )
        for rollout, at in zip(rollouts, _spans(rollouts, len(values_M)), strict=True)
    ]
    advantages_M = np.concatenate([np.zeros(0), *(estimate.advantages_M for estimate in estimates)])
    returns_M = np.concatenate([np.zeros(0), *(estimate.returns_M for estimate in estimates)])
    tokens_of_role = {role: at[trains_M[at]] for role, at in _tokens_of_role(rollouts).items()}
    metrics = _metrics(advantages_M[trains_M], returns_M[trains_M], values_M[trains_M])
    num_flat = sum(not has_spread(advantages_M[at]) for at in tokens_of_role.values() if len(at))
    return ValueCredit(
        advantages=_whitened(advantages_M, tokens_of_role, settings) if settings.whiten else advantages_M,
        returns=returns_M,
        metrics={**metrics, "credit/flat_roles": float(num_flat)},
    )


def _metrics(advantages: Floats, returns: Floats, values: Floats) -> dict[str, float]:
    return {
        "credit/advantage_mean": _mean(advantages),
        "credit/advantage_std": _std(advantages),
        "credit/return_mean": _mean(returns),
        "credit/return_std": _std(returns),
        "credit/value_mean": _mean(values),
        "credit/explained_variance": explained_variance(returns, values),
    }


def whiten(advantages: Floats, std_epsilon: float) -> Floats:
    """Brought to mean 0 and std 1; only to mean 0 where they are all equal, or there is but one."""
    centred = advantages - _mean(advantages)
    return centred / (centred.std() + std_epsilon) if has_spread(advantages) else centred


def has_spread(values: Floats) -> bool:
    """They differ by more than rounding does."""
    return _std(values) >= MIN_SPREAD


def explained_variance(returns_M: Floats, values_M: Floats) -> float:
    """Share of the returns' variance that the values foretell: 1 is all of it, 0 what a constant foretells, less than 0
    worse than that. 0 where returns have no spread.
    """
    return 1.0 - float(np.var(returns_M - values_M) / np.var(returns_M)) if has_spread(returns_M) else 0.0


def _whitened(advantages_M: Floats, tokens_of_role: Mapping[CallRole, Indices], settings: CreditSettings) -> Floats:
    """Each role by itself, so that those of main do not depend on what else trains."""
    whitened_M = np.zeros_like(advantages_M)
    for at in tokens_of_role.values():
        whitened_M[at] = whiten(advantages_M[at], settings.std_epsilon)
    return whitened_M


def _tokens_of_role(rollouts: Sequence[RewardedTurns]) -> dict[CallRole, Indices]:
    """Which of the step's tokens each role drew."""
    parts: defaultdict[CallRole, list[Indices]] = defaultdict(list)
    start = 0
    for rollout in rollouts:
        for turn in rollout.turns:
            parts[turn.role].append(np.arange(start + turn.start, start + turn.stop))
        start += rollout.num_tokens
    return {role: np.concatenate(spans) for role, spans in parts.items()}


def _spans(rollouts: Sequence[RewardedTurns], num_tokens: int) -> list[slice]:
    """Where the tokens of each rollout stand."""
    ends = list(accumulate((rollout.num_tokens for rollout in rollouts), initial=0))
    assert ends[-1] == num_tokens, "one value for each token that was drawn"
    return [slice(start, stop) for start, stop in pairwise(ends)]


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _std(values: Floats) -> float:
    return float(values.std()) if len(values) else 0.0
