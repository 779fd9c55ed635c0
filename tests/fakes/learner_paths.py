"""The learner's step over trees, and the same over the paths of the trees, which it must equal.

Over paths, each root-to-leaf path is a row of its own, by transformers' own attention; every copy of a token has the
token's one credit, and its weight over the number of copies. Written from what docs/learner.md says of a step; of the
learner it takes the losses of a row alone, which have tests of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from clawhpc.credit.gae import Floats
from clawhpc.credit.values import ValueCredit
from clawhpc.learner.attention import use_tree_attention
from clawhpc.learner.batch import Draws, TreeBatch
from clawhpc.learner.losses import Paths, policy_loss, value_loss
from clawhpc.learner.networks import TreeCritic, TreePolicy
from clawhpc.learner.rl_module import RlModule
from clawhpc.learner.settings import LearnerSettings
from clawhpc.learner.steps import StepBatch
from clawhpc.learner.value_scale import KEEP, LEAST_VARIANCE
from tests.fakes.learner_trees import VOCAB, Forest, tiny_model

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Update:
    """One update, before the optimizer moves."""

    loss: float
    gradients: dict[str, Tensor | None]
    """None for a parameter that stays."""
    size: float = 1.0
    """Sum of the absolute values of the terms that the loss is a sum of."""


@dataclass(frozen=True)
class Networks:
    policy: TreePolicy
    critic: TreeCritic | None
    reference: TreePolicy

    @classmethod
    def make(cls, kind: str, dtype: torch.dtype, critic: str, *, on_trees: bool) -> Networks:
        """The same weights for the same arguments. `critic`: none, own, or policy."""
        models = [tiny_model(kind, seed=seed, dtype=dtype) for seed in (0, 1, 0)]
        blur(models[2])
        if on_trees:
            for model in models:
                use_tree_attention(model)
        networks = cls(
            policy=TreePolicy(models[0], num_token_ids=VOCAB, logit_chunk=7, with_values=critic == "policy"),
            critic=TreeCritic(models[1].base_model) if critic == "own" else None,
            reference=TreePolicy(models[2], num_token_ids=VOCAB, logit_chunk=7, with_values=False),
        )
        for head in (networks.policy.value_head, networks.critic and networks.critic.value_head):
            if head is not None:
                nn.init.normal_(head.linear.weight, std=0.1, generator=torch.Generator().manual_seed(0))
                head.to(dtype)
        return networks


@torch.no_grad()
def blur(model: PreTrainedModel) -> None:
    """Some way off: a reference that is far from the policy would magnify all rounding by exp of the distance."""
    generator = torch.Generator().manual_seed(0)
    for value in model.parameters():
        value += 0.02 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)


def credit_of(values_M: Floats) -> ValueCredit:
    """Some credit that depends on the values, with returns far from their unit."""
    noise = np.random.default_rng(len(values_M)).normal(size=(2, len(values_M)))
    return ValueCredit(advantages=noise[0] - values_M / 3, returns=2 + 3 * noise[1] + values_M / 2, metrics={})


class TreeLearner(RlModule):
    """The learner's own step, without Lightning around it; it notes each of its updates."""

    def __init__(self, settings: LearnerSettings, networks: Networks) -> None:
        with_critic = networks.critic is not None or networks.policy.value_head is not None
        super().__init__(settings, Path(), 1, with_critic=with_critic)
        self.policy, self.critic = networks.policy, networks.critic
        self.reference = (networks.reference,) if settings.loss.kl_coef else ()
        self.updates: list[Update] = []
        self.loss = 0.0
        # AdamW would make much of the rounding of a gradient that is next to nothing.
        self.sgd = torch.optim.SGD([{"params": of["params"]} for of in self.configure_optimizers().param_groups])
        self.sgd.register_step_pre_hook(lambda *_: self.note())

    def learn(self, step: int, forest: Forest, rows: Sequence[TreeBatch]) -> list[Update]:
        self.updates = []
        credit = credit_of if self.with_critic else None
        self.training_step(StepBatch(step=step, rows=tuple(rows), draws=forest.draws, metrics={}, credit=credit), step)
        return self.updates

    def note(self) -> None:
        gradients = {name: copied(value.grad) for name, value in self.named_parameters()}
        self.updates.append(Update(self.loss, gradients))
        self.loss = 0.0

    def manual_backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        self.loss += loss.item()
        loss.backward()

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.sgd

    def log_dict(self, *_: Any, **__: Any) -> None: ...


class PathLearner(nn.Module):
    """The same step from the definitions."""

    def __init__(self, settings: LearnerSettings, networks: Networks) -> None:
        super().__init__()
        self.settings = settings
        self.policy, self.critic = networks.policy, networks.critic
        self.reference = (networks.reference,)
        self.with_critic = self.critic is not None or self.policy.value_head is not None
        self.returns: list[Tensor] = []
        """Of each step so far, those of the tokens that train."""

    def learn(self, step: int, forest: Forest) -> list[Update]:
        paths = tree_paths(forest)
        draws = self.known(forest.draws, paths)
        waits = self.with_critic and step < self.settings.critic.warmup_steps
        updates = []
        for _ in range(self.settings.epochs):
            loss, size = self.losses(forest, paths, draws, values_only=waits)
            loss.backward()
            updates.append(Update(loss.item(), self.gradients(values_only=waits), size.item()))
            self.move(step, updates[-1])
        return updates

    @torch.no_grad()
    def known(self, draws: Draws, paths: Sequence[TreePath]) -> Draws:
        """What is known before the first update."""
        old, values, reference = (torch.zeros_like(draws.sampling_logprobs) for _ in range(3))
        for path in paths:
            old[path.draws], of_path = self.output(path)
            if of_path is not None:
                values[path.draws] = of_path
            reference[path.draws] = logprobs_of(self.reference[0], path)
        draws = replace(draws, old_logprobs=old, reference_logprobs=reference if self.settings.loss.kl_coef else None)
        if not self.with_critic:
            return draws
        trains = draws.token_weight > 0
        mean, std = self.scale(self.returns or [draws.rewards[trains].double()])
        credit = credit_of((values * std + mean).double().numpy())
        returns = torch.from_numpy(credit.returns).to(values)
        self.returns.append(returns[trains].double())
        mean, std = self.scale(self.returns)
        advantages = torch.from_numpy(credit.advantages).to(values)
        return replace(draws, advantages=advantages, returns=(returns - mean) / std, old_values=values)

    def scale(self, of_steps: Sequence[Tensor]) -> tuple[float, float]:
        """Running mean and std of the returns of each step."""
        if not self.settings.critic.normalise_returns:
            return 0.0, 1.0
        weights = [KEEP**age for age in reversed(range(len(of_steps)))]
        mean, square = (
            sum(weight * of(returns).mean().item() for weight, returns in zip(weights, of_steps, strict=True))
            / sum(weights)
            for of in (torch.positive, torch.square)
        )
        return mean, math.sqrt(max(square - mean**2, LEAST_VARIANCE))

    def losses(
        self, forest: Forest, paths: Sequence[TreePath], draws: Draws, *, values_only: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss of an update, and the size of its terms."""
        outputs = [self.output(path) for path in paths]
        of_path = [(path.draws, logprobs_N) for path, (logprobs_N, _) in zip(paths, outputs, strict=True)]
        samples = of_path if self.settings.loss.ratio == "token" else conversation_samples(forest, of_path)
        terms = [] if values_only else list(self.policy_terms(samples, draws))
        values = [(path.draws, values_N) for path, (_, values_N) in zip(paths, outputs, strict=True)]
        of_values = list(self.value_terms(values, draws)) if self.with_critic else []
        zero = torch.zeros((), requires_grad=True)
        return (
            sum([term for term, _ in terms] + of_values, zero),
            sum([size for _, size in terms] + of_values, zero),
        )

    def policy_terms(self, samples: Sequence[Sample], draws: Draws) -> Iterator[tuple[Tensor, Tensor]]:
        for (indices, logprobs_N), known in zip(samples, shares(samples, draws), strict=True):
            alone = Paths(
                path_K=torch.zeros_like(torch.tensor(indices)), token_K=torch.arange(len(indices)), num_paths=1
            )

            def loss(
                advantages_N: Tensor,
                reference_N: Tensor | None,
                *,
                logprobs_N: Tensor = logprobs_N,
                known: Draws = known,
                alone: Paths = alone,
            ) -> Tensor:
                return policy_loss(
                    logprobs_N,
                    known.old_logprobs,
                    known.sampling_logprobs,
                    advantages_N,
                    known.token_weight,
                    self.settings.loss,
                    paths=alone,
                    reference_logprobs_N=reference_N,
                )[0]

            terms_of_one_sign = loss(-known.advantages.abs(), known.reference_logprobs).detach().abs()
            yield loss(known.advantages, known.reference_logprobs), terms_of_one_sign

    def value_terms(self, samples: Sequence[Sample], draws: Draws) -> Iterator[Tensor]:
        critic = self.settings.critic
        for (_, values_N), known in zip(samples, shares(samples, draws), strict=True):
            loss, _ = value_loss(values_N, known.old_values, known.returns, known.token_weight, critic.value_clip)
            yield critic.value_coef * loss

    def output(self, path: TreePath) -> tuple[Tensor, Tensor | None]:
        """Log-probs and values of the drawn tokens of a path."""
        if self.critic is not None:
            return logprobs_of(self.policy, path), self.critic.value_head(states(self.critic.backbone, path))
        hidden_ND = states(self.policy.model.base_model, path)
        values_N = None if self.policy.value_head is None else self.policy.value_head(hidden_ND)
        return logprobs_of(self.policy, path, hidden_ND), values_N

    def gradients(self, *, values_only: bool) -> dict[str, Tensor | None]:
        return {
            name: copied(value.grad) if is_critics(name) or not values_only else None
            for name, value in self.named_parameters()
        }

    @torch.no_grad()
    def move(self, step: int, update: Update) -> None:
        critic = self.settings.critic
        for name, value in self.named_parameters():
            rate, begins = (critic.lr, 0) if is_critics(name) else (self.settings.lr, critic.warmup_steps)
            made = step + 1 - (begins if self.with_critic else 0)
            factor = min(1.0, made / self.settings.warmup_steps)
            value.grad, gradient = None, update.gradients[name]
            if gradient is not None:
                value -= factor * rate * gradient


Sample = tuple[list[int], Tensor]
"""Draws that share one ratio where paths have one, and what a network says of each."""


def shares(samples: Sequence[Sample], draws: Draws) -> Iterator[Draws]:
    """What is known of the draws of each sample, with its share of their weight."""
    num_copies = Counter(draw for indices, _ in samples for draw in indices)
    for indices, _ in samples:
        known = draws.at(torch.tensor(indices))
        yield replace(known, token_weight=known.token_weight / torch.tensor([num_copies[draw] for draw in indices]))


def conversation_samples(forest: Forest, of_path: Sequence[Sample]) -> list[Sample]:
    """Along conversations, each draw with the mean over its copies, which are all the same."""
    copies: dict[int, list[Tensor]] = {}
    for indices, logprobs_N in of_path:
        for draw, logprob in zip(indices, logprobs_N, strict=True):
            copies.setdefault(draw, []).append(logprob)
    mean = {draw: torch.stack(same).mean() for draw, same in copies.items()}
    return [(walk, torch.stack([mean[draw] for draw in walk])) for walk in conversations(forest)]


def conversations(forest: Forest) -> list[list[int]]:
    """The draws of each conversation of the step from its begin to one of its ends."""
    found = []
    for step_tree in forest.step_trees:
        tree, before = step_tree.tree, {}
        for leaf in tree.leaf_of_call.values():
            above = [tree.nodes[at] for at in tree.path(leaf)[:-1]]
            heard = [node.call_id if node.sampled else node.continues_id for node in above]
            before[tree.nodes[leaf].call_id] = next((call for call in reversed(heard) if call is not None), None)
        for call in before.keys() - before.values():
            walk: list[int] = []
            while call is not None:
                first, reply = step_tree.draw_of_call[call], tree.nodes[tree.leaf_of_call[call]].token_ids
                walk, call = [*range(first, first + len(reply)), *walk], before[call]
            found.append(walk)
    return [walk for walk in found if walk]


@dataclass(frozen=True)
class TreePath:
    """A root-to-leaf path as a row of its own."""

    token_ids: tuple[int, ...]
    trained: list[int]
    """Where in it drawn tokens stand."""
    draws: list[int]
    """Which of the step's draws these are."""


def tree_paths(forest: Forest) -> list[TreePath]:
    """Every root-to-leaf path that has drawn tokens."""
    found = []
    for step_tree in forest.step_trees:
        tree = step_tree.tree
        for leaf in tree.leaves:
            nodes = [tree.nodes[step] for step in tree.path(leaf)]
            places = [
                (node.start + offset, step_tree.draw_of_call[node.call_id] + offset)
                for node in nodes
                if node.sampled
                for offset in range(len(node.token_ids))
            ]
            if places:
                found.append(TreePath(tree.path_token_ids(leaf), *map(list, zip(*places, strict=True))))
    return found


def logprobs_of(policy: TreePolicy, path: TreePath, hidden_ND: Tensor | None = None) -> Tensor:
    hidden_ND = states(policy.model.base_model, path) if hidden_ND is None else hidden_ND
    targets = torch.tensor([path.token_ids[at] for at in path.trained])
    logprobs_NV = (policy.model.get_output_embeddings()(hidden_ND) / TEMPERATURE).log_softmax(-1)
    return logprobs_NV.gather(-1, targets[:, None])[:, 0]


def states(backbone: PreTrainedModel, path: TreePath) -> Tensor:
    """The hidden states from which the drawn tokens of a path are predicted."""
    hidden_BTD = backbone(input_ids=torch.tensor([path.token_ids]), use_cache=False).last_hidden_state
    return hidden_BTD[0, [at - 1 for at in path.trained]]


def is_critics(name: str) -> bool:
    """A parameter that only the critic has."""
    return name.startswith("critic.") or "value_head" in name


def copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()
