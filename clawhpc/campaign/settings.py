"""How much a campaign collects, and by whom. Light to import."""

from __future__ import annotations

from dataclasses import dataclass, field

from clawhpc.errors import at_least
from clawhpc.learner.settings import PolicySettings
from clawhpc.proxy.settings import EndpointSettings


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


@dataclass(frozen=True, kw_only=True)
class PolicyChoice:
    """Where training starts, or who is evaluated."""

    folder: str | None = None
    """A policy folder, or that of a Hugging Face model. None: the one that sft makes of these very settings."""
    renderer: str | None = None
    """Chat format of a model that sft did not write, such as qwen3."""
    thinking: bool = False
    """Whether such a model may think before it answers. False writes what its chat format has for that into every
    prompt; qwen3, an empty block of thoughts. So true also for one that never thinks and has no such block, as Qwen's
    Instruct-2507.
    """
    shape: PolicySettings = field(default_factory=PolicySettings)
    """Of a policy that sft makes."""
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    """A model behind an API that is evaluated in a policy's place."""

    def __post_init__(self) -> None:
        if self.folder is not None and self.endpoint.is_set:
            raise ValueError("folder and endpoint.model are both set: one policy answers, not two")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """What `python -m clawhpc.evaluate` compares: each policy, with each harness, on each set of tasks."""

    policies: dict[str, str | PolicyChoice] = field(default_factory=dict)
    """Name -> a folder, or settings as those of `policy`. The folder of a run stands for the last policy in it; one
    with `*`, for each that it matches. Empty: the one that `policy` names.
    """
    sets: dict[str, str] = field(default_factory=dict)
    """Name -> folder of tasks. Empty: `heldout`, the tasks that training would be evaluated on; all, where a user's own
    folder has no such.
    """
