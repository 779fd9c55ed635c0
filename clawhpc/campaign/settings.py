"""How much a campaign collects. Light to import."""

from __future__ import annotations

from dataclasses import dataclass

from clawhpc.errors import at_least


@dataclass(frozen=True, kw_only=True)
class CampaignSettings:
    """How much is collected, and for how long."""

    num_steps: int = 100
    """Updates of the policy, at most."""
    train_min: float = 0.0
    """No step begins after so many minutes of training, those before a resume included; 0 for no such limit. One that
    has begun is trained on.
    """
    groups_per_step: int = 8
    """(task, harness) pairs of one step."""
    samples_per_group: int = 8
    """Rollouts that are compared with one another."""
    temperature: float = 1.0
    eval_tasks: int | None = None
    """Held-out tasks that are evaluated before and after training, with each harness; None for all, 0 for none."""
    eval_samples: int = 1
    """Rollouts of each of them."""
    stall_min: float = 20.0
    """A collection in which no rollout ends for so long has failed. More than the starts of an engine that are tried,
    and the deadlines of all attempts of a rollout.
    """
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, num_steps=0, train_min=0, groups_per_step=1, samples_per_group=1, eval_samples=1, stall_min=0.1)
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: must be more than 0")
        if self.eval_tasks is not None:
            at_least(self, eval_tasks=0)
