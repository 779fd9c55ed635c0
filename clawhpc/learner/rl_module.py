"""Reinforcement learning on the rows of a step: the GRPO family, and PPO with a critic.

Values, and log-probs by a reference policy, come from a pass without gradient before credit. Where the critic is a head
on the policy, that pass gives the old log-probs too. Else the first update does: its forward pass is by the policy
before the update, so its ratio learner/old is exactly 1, and no pass is made for them alone.

Shapes: K numbers that a network says of each token, M tokens of the step that train, N those of one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from clawhpc.learner.batch import Draws, TreeBatch
from clawhpc.learner.by_harness import add_gaps
from clawhpc.learner.losses import Sums, policy_loss, value_loss
from clawhpc.learner.means import StepMeans, sum_of_trained
from clawhpc.learner.module import LearnerModule, Part
from clawhpc.learner.networks import TreeCritic, TreePolicy, load_tree_critic, load_tree_policy
from clawhpc.learner.ranks import ALONE, Ranks
from clawhpc.learner.settings import LearnerSettings
from clawhpc.learner.steps import StepBatch
from clawhpc.learner.value_scale import ReturnScale, moments

OF_LATER_UPDATES = frozenset({"clip_share", "update_kl"})
"""Always 0 in the first update of a step, whose ratio is 1."""


class RlModule(LearnerModule):
    """Reinforcement learning on trees: the GRPO family, and PPO with a critic."""

    critic: TreeCritic | None
    """One with a backbone of its own; once Lightning has called `configure_model`."""
    reference: Sequence[TreePolicy] = ()
    """The policy that the run began with, where there is a KL term: in a tuple, it is part of no checkpoint."""

    def __init__(
        self,
        settings: LearnerSettings,
        policy_folder: Path,
        num_steps: int,
        *,
        with_critic: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(settings, policy_folder, num_steps, ranks=ranks)
        self.num_epochs = settings.epochs
        self.with_critic = with_critic
        self.scale = ReturnScale(enabled=settings.critic.normalise_returns)

    def configure_model(self) -> None:
        """Load the policy; beside it, where they are asked for, a critic and the policy that the run began with."""
        if hasattr(self, "policy"):
            return
        shared = self.with_critic and self.settings.critic.backbone == "policy"
        folder, settings, empty = self.policy_folder, self.settings, not self.ranks.first
        self.policy = self.share(load_tree_policy(folder, settings, with_values=shared, empty=empty))
        own = self.with_critic and not shared
        self.critic = self.share(load_tree_critic(folder, settings, empty=empty)) if own else None
        if settings.loss.kl_coef:
            self.reference = (self.share(load_tree_policy(folder, settings, empty=empty).requires_grad_(False)),)

    def on_train_start(self) -> None:
        """Bring along what Lightning does not move: the reference is a part of nothing that it knows."""
        for network in self.reference:
            network.to(self.device)

    def parts(self) -> list[Part]:
        """The policy's own parameters; those that only the critic has."""
        of_critic = [module for module in (self.policy.value_head, self.critic) if module is not None]
        values = [parameter for module in of_critic for parameter in module.parameters()]
        theirs = set(values)
        own = [parameter for parameter in self.policy.parameters() if parameter not in theirs]
        policy = Part(parameters=own, lr=self.settings.lr, first_step=self.first_step)
        return [policy, *([Part(parameters=values, lr=self.settings.critic.lr)] if values else [])]

    @property
    def first_step(self) -> int:
        """Of the policy; in those before it only the critic learns."""
        return self.settings.critic.warmup_steps if self.with_critic else 0

    def policy_waits(self, step: int) -> bool:
        """In the steps in which only the critic learns."""
        return step < self.first_step

    def waiting(self, step: int) -> list[nn.Parameter]:
        """The policy, where only the critic learns."""
        return self.parts()[0].parameters if self.policy_waits(step) else []

    @torch.no_grad()
    def prepare(self, step: StepBatch) -> tuple[Draws, dict[str, float]]:
        """With a critic, a pass over all rows finds its values, and from them the credit.

        Old log-probs that this pass does not give are left to the first update.
        """
        draws = step.draws.to(self.device)
        if self.reference:
            (reference_M,) = self._pass(step, self._reference_of, 1)
            draws = dataclasses.replace(draws, reference_logprobs=reference_M)
        if not self.with_critic:
            return dataclasses.replace(draws, old_logprobs=torch.zeros_like(draws.sampling_logprobs)), {}
        trains_M = draws.token_weight > 0
        assert draws.rewards is not None, "rollouts have rewards"
        scale = self.scale.or_first(draws.rewards[trains_M])
        old_logprobs_M, values_M = self._pass(step, self._critic_of, 2)
        known = step.credit and step.credit(scale.restore(values_M).double().cpu().numpy())
        credit = self.ranks.broadcast(known)
        assert credit is not None, "rollouts have rewards"
        returns_M = torch.from_numpy(credit.returns).to(values_M)
        self.scale.update(*moments(returns_M[trains_M]))
        return dataclasses.replace(
            draws,
            advantages=torch.from_numpy(credit.advantages).to(values_M),
            returns=self.scale.normalise(returns_M),
            old_values=values_M,
            old_logprobs=old_logprobs_M,
        ), credit.metrics

    def _pass(self, step: StepBatch, of_row: Callable[[TreeBatch], Tensor], num_values: int) -> Tensor:
        """(K, M): what `of_row` says of each row's tokens, on all ranks; each draw trains in one row of one rank."""
        found_KM = step.draws.sampling_logprobs.new_zeros(num_values, len(step.draws), device=self.device)
        for row in (row.to(self.device) for row in step.rows):
            found_KM[:, row.draw_N] = of_row(row).to(found_KM)
        return self.ranks.add(found_KM)

    def _critic_of(self, row: TreeBatch) -> Tensor:
        """Log-probs, 0 where they are left to the first update, and values."""
        if self.critic is not None:
            values_N = self.critic(row)
            return torch.stack([torch.zeros_like(values_N), values_N])
        output = self.policy(row)
        assert output.values_N is not None, "the policy has a value head"
        return torch.stack([output.logprobs_N, output.values_N])

    def _reference_of(self, row: TreeBatch) -> Tensor:
        return self.reference[0](row).logprobs_N

    def learn_row(self, step: int, row: TreeBatch, draws: Draws, total: StepMeans, *, first: bool) -> None:
        """`losses.policy_loss` and `losses.value_loss` of the row's tokens, each where it is learned in this step."""
        waits = self.policy_waits(step)
        if self.critic is None or not waits:
            self._learn_policy(row, draws, total, first=first, values_only=waits)
        if self.critic is not None:
            known = draws.at(row.draw_N)
            loss, sums = self._value_loss(self.critic(row), known)
            self.manual_backward(loss)
            total.add(sums, known.token_weight)

    def _learn_policy(self, row: TreeBatch, draws: Draws, total: StepMeans, *, first: bool, values_only: bool) -> None:
        output = self.policy(row)
        assert draws.old_logprobs is not None, "prepared"
        if first and output.values_N is None:
            draws.old_logprobs[row.draw_N] = output.logprobs_N.detach().to(draws.old_logprobs)
        known = draws.at(row.draw_N)
        assert known.old_logprobs is not None, "prepared"
        loss, sums = policy_loss(
            output.logprobs_N,
            known.old_logprobs,
            known.sampling_logprobs,
            known.advantages,
            known.token_weight,
            self.settings.loss,
            paths=row.paths,
            reference_logprobs_N=known.reference_logprobs,
        )
        if output.values_N is not None:
            of_values, more = self._value_loss(output.values_N, known)
            loss, sums = of_values if values_only else loss + of_values, sums | more
        self.manual_backward(loss)
        sums = sums | {"entropy": sum_of_trained(output.entropy_N, known.token_weight)}
        still = OF_LATER_UPDATES if values_only or self.num_epochs == 1 else frozenset()
        total.add({name: value for name, value in sums.items() if name not in still}, known.token_weight)

    def add_after(self, step: StepBatch, draws: Draws, total: StepMeans) -> None:
        """The gap between log-probs, harness by harness, unless old ones were not needed: an own critic warms up."""
        if step.harnesses and not (self.critic is not None and self.policy_waits(step.step)):
            own_N = torch.cat([row.draw_N for row in step.rows]).to(self.device)
            add_gaps(total, draws, own_N, step.harnesses)

    def _value_loss(self, values_N: Tensor, known: Draws) -> tuple[Tensor, Sums]:
        assert known.old_values is not None, "prepared"
        assert known.returns is not None, "prepared"
        settings = self.settings.critic
        loss, sums = value_loss(values_N, known.old_values, known.returns, known.token_weight, settings.value_clip)
        return settings.value_coef * loss, sums
