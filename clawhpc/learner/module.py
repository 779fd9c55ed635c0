"""The optimizer updates of one step.

A step is `num_epochs` updates, each over all rows of the step with their gradients added up.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from clawhpc.errors import UserError
from clawhpc.learner.batch import Draws, TreeBatch
from clawhpc.learner.losses import sft_loss
from clawhpc.learner.means import StepMeans, sum_of_trained
from clawhpc.learner.networks import TreePolicy, load_tree_policy
from clawhpc.learner.ranks import ALONE, Ranks
from clawhpc.learner.settings import LearnerSettings
from clawhpc.learner.sharding import clip_gradients, full_weights, shard
from clawhpc.learner.steps import StepBatch

log = logging.getLogger(__name__)

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is clipped by itself and has its own learning rate."""

    parameters: list[nn.Parameter]
    lr: float
    """Peak."""
    first_step: int = 0
    """That moves it; its warm-up begins there."""


class LearnerModule(LightningModule):
    """Trains the policy in a folder, one `StepBatch` at a time. Subclasses say what is learned from a row."""

    policy: TreePolicy
    """Once Lightning has called `configure_model`."""
    num_epochs = 1
    """Updates per step."""

    def __init__(self, settings: LearnerSettings, policy_folder: Path, num_steps: int, *, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.settings = settings
        self.policy_folder = policy_folder
        self.num_steps = num_steps
        self.ranks = ranks

    def configure_model(self) -> None:
        """Load the policy, and leave each rank its part."""
        if not hasattr(self, "policy"):
            empty = not self.ranks.first
            self.policy = self.share(load_tree_policy(self.policy_folder, self.settings, empty=empty))

    @property
    def sharded(self) -> bool:
        """Networks are FSDP's: among ranks, and for mixed precision."""
        return self.ranks.size > 1 or self.settings.mixed

    def share(self, network: Network) -> Network:
        """Leave each rank its part of a network that rank 0 has loaded; the others give an empty one."""
        if self.sharded:
            assert self.device_mesh is not None, "the strategy has made it"
            shard(network, self.device_mesh["data_parallel"], self.ranks, bf16=self.settings.mixed)
        return network

    def policy_weights(self) -> dict[str, Tensor] | None:
        """What `save_policy` must be given of a policy in shards; all ranks must call, and rank 0 gets it."""
        return full_weights(self.policy.model, self.ranks) if self.sharded else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all parameters, those of the policy and of its critic each at a rate of their own."""
        settings = self.settings
        groups = [{"params": part.parameters} for part in self.parts()]
        return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)

    def parts(self) -> list[Part]:
        """The policy first."""
        return [Part(parameters=list(self.policy.parameters()), lr=self.settings.lr)]

    def rates(self, step: int) -> list[float]:
        """Of each part in `step`."""
        return [
            part.lr * schedule_factor(self.settings, step, self.num_steps, part.first_step) for part in self.parts()
        ]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out Lightning's loop counters: the position in the data says all, also if more steps are asked for."""
        del checkpoint["loops"]

    def training_step(self, step: StepBatch, batch_idx: int) -> dict[str, Any]:
        """Make the updates of `step`. A step without a trained token leaves weights and optimizer as they are."""
        began = time.perf_counter()
        metrics = {**step.metrics, "train/lr": self.rates(step.step)[0]}
        if step.rows:
            metrics |= self._update(step)
        metrics["time/learn_s"] = time.perf_counter() - began
        self._log(step.step, metrics)
        return metrics

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        on_bar = {name: value for name, value in metrics.items() if name in ("train/reward", "train/loss")}
        rest = {name: value for name, value in metrics.items() if name not in on_bar}
        self.log_dict(on_bar, prog_bar=True, batch_size=1)
        self.log_dict({**rest, "step": float(step)}, batch_size=1)  # Lightning takes its x-axis from "step"

    def _update(self, step: StepBatch) -> dict[str, float]:
        """Means over the step. An update whose gradient is not finite is left out; UserError when all of them are."""
        optimizer: Any = self.optimizers()
        for group, rate in zip(optimizer.param_groups, self.rates(step.step), strict=True):
            group["lr"] = rate  # of these settings, which may not be those that a checkpoint was written with
        draws, metrics = self.prepare(step)
        total = StepMeans()
        for update in range(self.num_epochs):
            for row in step.rows:
                self.learn_row(step.step, row.to(self.device), draws, total, first=not update)
            norms = [clip_gradients(part.parameters, self.settings.max_grad_norm) for part in self.parts()]
            total.add_update(norms)
            if all(map(math.isfinite, norms)):
                for parameter in self.waiting(step.step):
                    parameter.grad = None  # for the optimizer it is not there
                optimizer.step()
            optimizer.zero_grad()
        self._judge(step.step, total)
        self.add_after(step, draws, total)
        total = total.fetch()
        for other in self.ranks.gather(total)[1:]:
            total.join(other)
        return metrics | {f"train/{name}": value for name, value in total.means().items()}

    def _judge(self, step: int, total: StepMeans) -> None:
        """A step of which nothing is fit to keep must not reach a checkpoint: no resume would ever leave it."""
        if not total.norms:
            raise UserError(
                f"step {step}: none of its {total.num_skipped} updates has a finite gradient, and none is kept; "
                "where the policy has diverged, begin again with a lower learner.lr"
            )
        if total.num_skipped:
            log.warning("step %d: %d updates are left out: their gradients are not finite", step, total.num_skipped)

    def prepare(self, step: StepBatch) -> tuple[Draws, dict[str, float]]:
        """What the updates need to know of the step's draws, and what there is to log of it."""
        return step.draws.to(self.device), {}

    def add_after(self, step: StepBatch, draws: Draws, total: StepMeans) -> None:
        """What there is to add up once all updates of the step are made."""

    def waiting(self, step: int) -> list[nn.Parameter]:
        """What stays as it is in this step."""
        return []

    def learn_row(self, step: int, row: TreeBatch, draws: Draws, total: StepMeans, *, first: bool) -> None:
        """Add the row's gradient, and what there is to log of it. `first`: no update of the step has been made."""
        raise NotImplementedError


class SftModule(LearnerModule):
    """Imitation of the sampled tokens; credit plays no part."""

    def learn_row(self, step: int, row: TreeBatch, draws: Draws, total: StepMeans, *, first: bool) -> None:
        """`losses.sft_loss` of the row's tokens."""
        output = self.policy(row)
        weight_N = draws.token_weight[row.draw_N]
        loss, sums = sft_loss(output.logprobs_N, weight_N)
        self.manual_backward(loss)
        total.add(sums | {"entropy": sum_of_trained(output.entropy_N, weight_N)}, weight_N)


def schedule_factor(settings: LearnerSettings, step: int, num_steps: int, first_step: int) -> float:
    """What a rate is multiplied by in `step`: a line up over the warm-up, which begins with `first_step`, then as
    `schedule` says.
    """
    if step < first_step:
        return 0.0
    warm = min(1.0, (step - first_step + 1) / max(1, settings.warmup_steps))
    left = (num_steps - step) / (num_steps - first_step) if settings.schedule == "linear" else 1.0
    return warm * left
