"""Sums over the rows and updates of a step, and their means for the log.

They stay on their device until they are asked for: to read one number of a GPU is to wait for all that it has to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from clawhpc.learner.losses import Sums


class StepMeans:
    """What an update adds up, per trained token and per update."""

    def __init__(self) -> None:
        self.norms: list[list[float]] = []
        """Of the gradients that were used: of the policy, and of a critic's own parameters."""
        self.num_skipped = 0
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}

    def add(self, sums: Sums, token_weight_N: Tensor) -> None:
        """One row of one update. Tokens of weight 0 are in no sum, and count in no mean."""
        num_tokens = (token_weight_N > 0).sum()
        for name, value in sums.items():
            self._add(name, value.double(), num_tokens)

    def join(self, other: StepMeans) -> None:
        """Take in what another rank has added up in the same updates."""
        for name, value in other._sums.items():
            self._add(name, value, other._tokens[name])

    def _add(self, name: str, value: Tensor, num_tokens: Tensor) -> None:
        if name in self._sums:
            before = self._sums[name]
            value = torch.maximum(before, value) if is_max(name) else before + value
            num_tokens = self._tokens[name] + num_tokens
        self._sums[name], self._tokens[name] = value, num_tokens

    def fetch(self) -> StepMeans:
        """The same in the memory of the CPU, in one transfer."""
        fetched = StepMeans()
        fetched.norms, fetched.num_skipped = self.norms, self.num_skipped
        if self._sums:
            both = torch.stack([*self._sums.values(), *self._tokens.values()]).cpu()
            sums, tokens = both.unbind()[: len(self._sums)], both.unbind()[len(self._sums) :]
            fetched._sums = dict(zip(self._sums, sums, strict=True))
            fetched._tokens = dict(zip(self._tokens, tokens, strict=True))
        return fetched

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
        value = self._sums[name].item()
        if is_max(name):
            return value
        return value / (num_updates if name in PER_UPDATE else max(1.0, self._tokens[name].item()))


PER_UPDATE = frozenset({"loss", "value_loss"})
"""Their token weights make means of them already."""


def is_max(name: str) -> bool:
    """A sum that is a maximum."""
    return name.endswith("_max")


def sum_of_trained(values_N: Tensor, token_weight_N: Tensor) -> Tensor:
    """Over the tokens whose weight is above 0, whatever the others say."""
    return values_N.where(token_weight_N > 0, values_N.new_zeros(())).sum()
