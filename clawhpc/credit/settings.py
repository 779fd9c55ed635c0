"""How rewards become credit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from clawhpc.errors import at_least
from clawhpc.records import CallRole

Estimator = Literal["group", "path_gae", "tree_gae"]
Baseline = Literal["grpo", "dr_grpo"]


@dataclass(frozen=True, kw_only=True)
class CreditSettings:
    """How the rewards of a step's rollouts become an advantage for each of their sampled tokens."""

    estimator: Estimator = "group"
    """`group`: how much better a rollout did than the others of its group. `path_gae`, `tree_gae`: from the values of a
    critic (PPO), on each path by itself or across the branches of the tree.
    """
    baseline: Baseline = "grpo"
    """For `group`: `dr_grpo` leaves out the division by the group's std, which favours tasks that are nearly solved or
    unsolved.
    """
    std_epsilon: float = 1e-6
    """Added to a std before it divides, in units of reward."""
    gamma: float = 1.0
    """For a critic: discount per sampled token."""
    gae_lambda: float = 1.0
    """For a critic: how far ahead rewards are waited for, 0 to 1; less trusts its values more."""
    whiten: bool = True
    """For a critic: advantages of a step are brought to mean 0 and std 1, for each role by itself."""
    role_weights: dict[str, float] = field(default_factory=dict)
    """Role other than main -> weight of its loss beside that of the main paths. A role not named does not train."""
    harness_weights: dict[str, float] = field(default_factory=dict)
    """Harness -> weight of its rollouts in the loss beside those of others in the same step; 1 where it is not named.
    One of 2 counts as if each of its rollouts stood there twice. Not for `tasks.mix=one`: a step has one harness.
    """

    def __post_init__(self) -> None:
        for key, allowed in (("estimator", Estimator), ("baseline", Baseline)):
            if getattr(self, key) not in get_args(allowed):
                raise ValueError(f"{key}={getattr(self, key)!r}: allowed are {', '.join(get_args(allowed))}")
        at_least(self, std_epsilon=0)
        for key in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, key) <= 1.0:
                raise ValueError(f"{key}={getattr(self, key)}: must be from 0 to 1")
        roles = [role.value for role in CallRole if role is not CallRole.MAIN]
        for role, weight in self.role_weights.items():
            if role not in roles or not 0 < weight < math.inf:
                raise ValueError(f"role_weights.{role}={weight}: allowed are {', '.join(roles)}, each a number over 0")
        for harness, weight in self.harness_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"harness_weights.{harness}={weight}: must be a number over 0")

    @property
    def needs_critic(self) -> bool:
        """Advantages come from values."""
        return self.estimator != "group"

    @property
    def trained_roles(self) -> frozenset[CallRole]:
        """Calls of these roles train."""
        return frozenset({CallRole.MAIN, *(CallRole(role) for role in self.role_weights)})

    def role_weight(self, role: CallRole) -> float:
        """Of the loss of a role that trains, beside 1 for main."""
        return 1.0 if role is CallRole.MAIN else self.role_weights[role]

    def harness_weight(self, harness: str) -> float:
        """Of the loss of a harness's rollouts, beside 1 for one that is not named."""
        return self.harness_weights.get(harness, 1.0)
