"""How often a policy would pass, without running anything: the gate of the cold start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from clawhpc.errors import UserError
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.settings import LearnerSettings
from clawhpc.learner.steps import build_sft_step
from clawhpc.learner.traces import Skill
from clawhpc.tree.nodes import CallTree

Rates = Mapping[Skill, float]
"""Skill -> share of its tasks that pass."""


def mean_rate(rates: Rates) -> float:
    """Over the skills, each weighing the same."""
    return sum(rates.values()) / len(rates)


def weakest_harness(rates: Rates) -> str:
    """The one whose skills have the lowest mean: harnesses with a short head are learned sooner than others."""
    harnesses = sorted({skill.harness for skill in rates})
    of = {name: {skill: rate for skill, rate in rates.items() if skill.harness == name} for name in harnesses}
    return min(harnesses, key=lambda name: mean_rate(of[name]))


def describe(rates: Rates) -> str:
    """For a person: `0.52 (create 0.61, append 0.43, …)`, with the harnesses where there are several."""
    several = len({skill.harness for skill in rates}) > 1
    names = [f"{skill.harness} {skill.family}" if several else skill.family for skill in rates]
    skills = ", ".join(f"{name} {rate:.2f}" for name, rate in zip(names, rates.values(), strict=True))
    return f"{mean_rate(rates):.2f} ({skills})"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """When a policy is good enough."""

    pass_rate: float
    """At least, of the mean over the skills."""
    floor: float
    """At least, of every skill."""

    def admits(self, rates: Rates) -> bool:
        """The mean is high enough, and no skill lags behind."""
        return mean_rate(rates) >= self.pass_rate and not self.laggards(rates)

    def laggards(self, rates: Rates) -> list[Skill]:
        """The skills below the floor."""
        return [skill for skill, rate in rates.items() if rate < self.floor]


@dataclass(frozen=True, kw_only=True)
class Exam:
    """Solved tasks, drawn apart from those of the lessons; a few may be in both."""

    trees: Mapping[Skill, Sequence[CallTree]]
    """Each ends with the last command of its solution; its commands are its sampled tokens."""
    settings: LearnerSettings

    def pass_rates(self, policy: TreePolicy) -> dict[Skill, float]:
        """How often `policy` would draw the oracle's very commands at temperature 1, by skill.

        That probability is the likelihood of the commands: nothing is sampled, so there is no noise but the choice of
        the tasks. It is a lower bound of pass@1, for other commands may do as well.
        """
        chances = iter(self._likelihoods(policy, [tree for trees in self.trees.values() for tree in trees]))
        return {skill: sum(next(chances) for _ in trees) / len(trees) for skill, trees in self.trees.items()}

    @torch.no_grad()
    def _likelihoods(self, policy: TreePolicy, trees: Sequence[CallTree]) -> list[float]:
        step = build_sft_step(0, trees, self.settings)
        if step.metrics["tree/over_budget"]:
            raise UserError(f"learner.token_budget={self.settings.row_tokens}: too small for one conversation")
        counts = torch.tensor([tree.num_sampled_tokens for tree in trees])
        tree_of_draw = torch.arange(len(trees)).repeat_interleave(counts)
        logprob_of_tree = torch.zeros(len(trees))
        for row in step.rows:
            logprobs_N = policy(row.to(policy.model.device)).logprobs_N
            logprob_of_tree.index_add_(0, tree_of_draw[row.draw_N], logprobs_N.float().cpu())
        return logprob_of_tree.exp().tolist()
