"""All knobs of the learner. Imports no torch, so that a config error costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Normaliser = Literal["token", "rollout", "constant"]
Schedule = Literal["constant", "linear"]
Precision = Literal["32-true", "bf16-mixed"]
WandbMode = Literal["offline", "online", "disabled"]


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """How a step's rollouts become an update of the policy. The defaults are the recipe for the tiny policy on CPU."""

    lr: float = 2e-4
    """Peak learning rate of AdamW; 0 is the control that learns nothing."""
    warmup_steps: int = 3
    """Steps over which `lr` rises in a line, the first one included."""
    schedule: Schedule = "constant"
    """After the warm-up: `constant`, or `linear` down to 0 after the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = 4
    """Optimizer updates per step, each over all of its tokens. The first one has a ratio of exactly 1."""
    clip_low: float = 0.2
    """A ratio learner/old below `1 - clip_low` gets no gradient that lowers it further."""
    clip_high: float = 0.28
    """A ratio above `1 + clip_high` gets none that raises it further (clip-higher, DAPO section 3.1)."""
    truncation: float = 2.0
    """Largest importance weight old/sampling (truncated importance sampling)."""
    normaliser: Normaliser = "token"
    """What weighs the same in the loss: every trained `token`, every `rollout`, or tokens over a `constant` length."""
    constant_tokens: int = 1024
    """For `normaliser=constant`: the length that stands for every rollout (Dr. GRPO)."""
    token_budget: int = 16_384
    """Most tokens in one row, each shared one counted once. A tree over it is refused and counted."""
    logit_chunk: int = 4096
    """Trained tokens whose logits exist at a time."""
    precision: Precision = "32-true"
    """Of Lightning's Trainer. `bf16-mixed` computes in bf16 and keeps weights and optimizer in fp32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    accelerator: str = "auto"
    """Of Lightning's Trainer: `cpu`, `cuda` or `auto`."""
    num_threads: int = 0
    """Threads of torch; 0 leaves torch's own choice. One is faster than two on a busy two-core machine."""
    checkpoint_every: int = 1
    """Steps between checkpoints. A resume makes the steps since the last one again, from the same data."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay; each holds weights, optimizer and random state."""
    seed: int = 0
    wandb: WandbMode = "offline"
    """Mode of Weights & Biases; the CSV log is always written."""

    def __post_init__(self) -> None:
        for key, allowed in _ALLOWED.items():
            if getattr(self, key) not in get_args(allowed):
                raise ValueError(f"learner.{key}={getattr(self, key)!r}: allowed are {', '.join(get_args(allowed))}")
        for key in ("epochs", "token_budget", "logit_chunk", "keep_checkpoints", "checkpoint_every", "constant_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"learner.{key}={getattr(self, key)}: must be at least 1")
        for key in ("truncation", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise ValueError(f"learner.{key}={getattr(self, key)}: must be more than 0")


_ALLOWED = {"schedule": Schedule, "normaliser": Normaliser, "precision": Precision, "wandb": WandbMode}


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Shape of a fresh policy of the Qwen3 family; the defaults learn to copy from a prompt on two CPU cores."""

    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    ffn_size: int = 384
    rope_theta: float = 500.0
    """Small, so that positions a few tokens apart look different to a small head."""
    initializer_range: float = 0.05
    max_positions: int = 8192
    """Longest context, prompt and completion together."""
    tie_embeddings: bool = True
    """The output head is the embedding matrix."""
    vocab_size: int = 1280
    """Most tokens of the tokenizer, the chat's own included; fewer where the texts give fewer merges."""


@dataclass(frozen=True, kw_only=True)
class ColdStartSettings:
    """How a policy is made that can be reinforced: it passes every kind of task sometimes, and none always."""

    traces_per_family: int = 2
    """Conversations of the oracle that are captured in each harness; one carries over to all tasks of its family."""
    batch_size: int = 16
    """Conversations of one update. Number counts for more than size: 16 learn twice as fast as 32 for the same cost."""
    lr: float = 2e-3
    """Of AdamW. At 3e-3 one family may never be learned."""
    warmup_steps: int = 10
    headless_steps: int = 400
    """Most updates of the first stage, in which conversations lack their head: a third of the cost of one with it."""
    headless_pass_rate: float = 0.7
    """Mean over the families that ends the first stage."""
    steps: int = 400
    """Most updates of the second stage, with the head."""
    pass_rate: float = 0.45
    """Mean over the families that ends the second stage. More would leave reinforcement learning little to gain."""
    floor: float = 0.15
    """Of every family at the end. A family that hardly ever passes gives no gradient: below 0.08 none ever took off."""
    check_every: int = 3
    """Updates of the second stage between two looks at the pass rates, which rise by a tenth in so many."""
    tasks_per_check: int = 40
    """Tasks of a look, for each harness."""
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("traces_per_family", "batch_size", "headless_steps", "steps", "check_every", "tasks_per_check"):
            if getattr(self, key) < 1:
                raise ValueError(f"cold_start.{key}={getattr(self, key)}: must be at least 1")
        for key in ("headless_pass_rate", "pass_rate", "floor"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"cold_start.{key}={getattr(self, key)}: must be at least 0 and less than 1")
