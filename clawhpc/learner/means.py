"""Sums over the rows and updates of a step, and their means for the log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from clawhpc.learner.losses import Sums


class StepMeans:
    """What an update adds up, per trained token and per update."""

    def __init__(self) -> None:
        self.norms: list[list[float]] = []
        """Of the gradients that were used: of the policy, and of a critic's own parameters."""
        self.num_skipped = 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._tokens: defaultdict[str, int] = defaultdict(int)

    def add(self, sums: Sums, token_weight_N: Tensor) -> None:
        """One row of one update. Tokens of weight 0 are in no sum, and count in no mean."""
        num_tokens = int((token_weight_N > 0).sum())
        for name, value in sums.items():
            self._tokens[name] += num_tokens
            if is_max(name):
                self._sums[name] = max(self._sums[name], value.item())
            else:
                self._sums[name] += value.item()

    def join(self, other: StepMeans) -> None:
        """Take in what another rank has added up in the same updates."""
        for name, value in other._sums.items():
            self._sums[name] = max(self._sums[name], value) if is_max(name) else self._sums[name] + value
            self._tokens[name] += other._tokens[name]

    def add_update(self, grad_norms: Sequence[float]) -> None:
        """One update is complete, or was left out since a norm is not finite."""
        if all(map(math.isfinite, grad_norms)):
            self.norms.append(list(grad_norms))
        else:
            self.num_skipped += 1

    def means(self) -> dict[str, float]:
        """Losses and gradient norms per update, all else per trained token. Not before an update was used."""
        num_updates = len(self.norms) + self.num_skipped
        norms = [sum(of_part) / len(self.norms) for of_part in zip(*self.norms, strict=True)]
        return {
            **{name: self._mean(name, num_updates) for name in self._sums},
            **dict(zip(("grad_norm", "critic_grad_norm"), norms, strict=False)),
            "skipped_updates": float(self.num_skipped),
        }

    def _mean(self, name: str, num_updates: int) -> float:
        value = self._sums[name]
        if is_max(name):
            return value
        return value / (num_updates if name in PER_UPDATE else max(1, self._tokens[name]))


PER_UPDATE = frozenset({"loss", "value_loss"})
"""Their token weights make means of them already."""


def is_max(name: str) -> bool:
    """A sum that is a maximum."""
    return name.endswith("_max")
