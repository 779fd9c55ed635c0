"""All knobs of the learner. Imports no torch, so that a config error costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from clawhpc.errors import at_least

Normaliser = Literal["token", "rollout", "constant"]
Schedule = Literal["constant", "linear"]
Precision = Literal["32-true", "bf16-mixed"]
Accelerator = Literal["auto", "cpu", "cuda"]
WandbMode = Literal["offline", "online", "disabled"]

NUM_SEEDS = 2**32
"""Seeds are below it; numpy takes no larger ones."""
LEAST_VOCABULARY = 265
"""Every byte, and the chat's own tokens."""


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
    accelerator: Accelerator = "auto"
    """Of Lightning's Trainer."""
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
                raise ValueError(f"{key}={getattr(self, key)!r}: allowed are {', '.join(get_args(allowed))}")
        at_least(self, lr=0, warmup_steps=0, weight_decay=0, clip_low=0, clip_high=0, num_threads=0, seed=0)
        at_least(self, epochs=1, constant_tokens=1, token_budget=1, logit_chunk=1)
        at_least(self, checkpoint_every=1, keep_checkpoints=1)
        for key in ("truncation", "max_grad_norm"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key}={getattr(self, key)}: must be more than 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each must be at least 0 and less than 1")
        if self.seed >= NUM_SEEDS:
            raise ValueError(f"seed={self.seed}: must be less than {NUM_SEEDS}")


_ALLOWED = {
    "schedule": Schedule,
    "normaliser": Normaliser,
    "precision": Precision,
    "accelerator": Accelerator,
    "wandb": WandbMode,
}


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

    def __post_init__(self) -> None:
        at_least(self, num_layers=1, hidden_size=1, num_heads=1, num_kv_heads=1, head_dim=2, ffn_size=1)
        at_least(self, rope_theta=1, max_positions=1, vocab_size=LEAST_VOCABULARY)
        if not 0 < self.initializer_range < float("inf"):
            raise ValueError(f"initializer_range={self.initializer_range}: must be more than 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, for positions turn pairs of numbers")


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
        at_least(self, traces_per_family=1, batch_size=1, lr=0, warmup_steps=0, headless_steps=1, steps=1)
        at_least(self, check_every=1, tasks_per_check=1, seed=0)
        for key in ("headless_pass_rate", "pass_rate", "floor"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"{key}={getattr(self, key)}: must be at least 0 and less than 1")
