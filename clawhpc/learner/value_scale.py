"""The unit in which a critic learns: returns less their running mean, over their running std.

So a critic learns at the same rate whatever the size of the rewards, and a bound on how far a value may move means the
same everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

KEEP = 0.99
"""Of the running moments at each update; the rest is the step's. About the last hundred steps count: values keep their
meaning from one step to the next, and yet follow a policy that improves.
"""
LEAST_VARIANCE = 1e-2
"""Where returns hardly differ, small errors must not become large ones; the bound of MAPPO's code, for rewards of
about 1.
"""


def moments(returns_M: Tensor) -> Tensor:
    """(3,) in float64: count, sum and sum of squares. Those of several ranks add up."""
    values_M = returns_M.double()
    return torch.stack([values_M.new_tensor(float(len(values_M))), values_M.sum(), values_M.square().sum()])


class ReturnScale(nn.Module):
    """Running mean and std of returns; its buffers belong in a checkpoint.

    The identity before the first update, and always where it is not `enabled`. Each step's mean and mean square enter
    with equal weight, whatever its size; dividing by the sum of all weights takes out the zeros that the averages
    began with. MAPPO (arXiv 2103.01955), value normalisation.
    """

    mean_sum: Tensor
    square_sum: Tensor
    weight: Tensor

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__()
        self.enabled = enabled
        for name in ("mean_sum", "square_sum", "weight"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, count: Tensor, total: Tensor, squares: Tensor) -> None:
        """Take in the `moments` of one step, of all ranks together. A step without returns changes nothing."""
        if not self.enabled or not count:
            return
        self.mean_sum.lerp_(total / count, 1 - KEEP)
        self.square_sum.lerp_(squares / count, 1 - KEEP)
        self.weight.lerp_(torch.ones_like(self.weight), 1 - KEEP)

    def or_first(self, rewards: Tensor) -> ReturnScale:
        """Itself; before the first update one by `rewards`, so that a critic that has learned nothing says their mean.

        It is for that one step: as returns, its rewards enter the averages once.
        """
        if self.weight:
            return self
        first = ReturnScale(enabled=self.enabled).to(rewards.device)
        first.update(*moments(rewards))
        return first

    @property
    def mean(self) -> Tensor:
        """Of returns; 0 before the first update."""
        return self.mean_sum / self.weight if self.weight else torch.zeros_like(self.weight)

    @property
    def std(self) -> Tensor:
        """Of returns, not below the least; 1 before the first update."""
        if not self.weight:
            return torch.ones_like(self.weight)
        return (self.square_sum / self.weight - self.mean.square()).clamp(min=LEAST_VARIANCE).sqrt()

    def normalise(self, returns: Tensor) -> Tensor:
        """Returns in the critic's unit, in their own dtype."""
        return ((returns - self.mean) / self.std).to(returns.dtype)

    def restore(self, values: Tensor) -> Tensor:
        """The critic's values in the unit of returns, in their own dtype."""
        return (values * self.std + self.mean).to(values.dtype)
