"""How much a campaign collects. Light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CampaignSettings:
    """How much is collected, and for how long."""

    num_steps: int = 100
    """Updates of the policy, at most."""
    train_min: float = 0.0
    """No step begins after so many minutes of training, those before a resume included; 0 for no such limit."""
    groups_per_step: int = 8
    """(task, harness) pairs of one step."""
    samples_per_group: int = 8
    """Rollouts that are compared with one another."""
    temperature: float = 1.0
    eval_tasks: int = 64
    """Held-out tasks that are evaluated before and after training, with each harness; 0 for none."""
    eval_samples: int = 1
    """Rollouts of each of them."""
    stall_min: float = 20.0
    """A collection in which no rollout ends for so long has failed. More than an engine's start and a deadline."""
    seed: int = 0
