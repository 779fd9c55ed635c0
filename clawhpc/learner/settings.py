"""All knobs of the learner. Imports no torch, so that a config error costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from clawhpc.errors import at_least

Objective = Literal["clip", "cispo"]
Ratio = Literal["token", "path"]
Importance = Literal["truncate", "mask"]
Normaliser = Literal["token", "rollout", "constant"]
Backbone = Literal["own", "policy"]
Schedule = Literal["constant", "linear"]
Precision = Literal["32-true", "bf16-mixed"]
Accelerator = Literal["auto", "cpu", "cuda"]
WandbMode = Literal["offline", "online", "disabled"]

NUM_SEEDS = 2**32
"""Seeds are below it; numpy takes no larger ones."""
LEAST_ROW = 16_384
"""Tokens of a row where nothing asks for more."""
LEAST_VOCABULARY = 265
"""Every byte, and the chat's own tokens."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss of the policy. conf/algorithm/ holds the combinations that have a name: GRPO, DAPO, GSPO, CISPO, PPO."""

    objective: Objective = "clip"
    """`clip`: a ratio that has gone too far gets no gradient (PPO). `cispo`: it is a constant, clipped, and the
    gradient is that of the log-prob (CISPO).
    """
    ratio: Ratio = "token"
    """learner/old of each `token`, or one for each conversation `path`, the geometric mean over its tokens (GSPO)."""
    clip_low: float = 0.2
    """A ratio below `1 - clip_low` gets no gradient that lowers it further."""
    clip_high: float = 0.28
    """A ratio above `1 + clip_high` gets none that raises it further (clip-higher, DAPO section 3.1)."""
    importance: Importance = "truncate"
    """What becomes of the weight old/sampling of a token outside of its bounds: the bound (truncated importance
    sampling), or 0 (masked importance sampling; with a lower bound too, IcePop).
    """
    importance_low: float = 0.0
    """Smallest importance weight."""
    importance_high: float = 2.0
    """Largest importance weight."""
    normaliser: Normaliser = "token"
    """What weighs the same in the loss: every trained `token`, every `rollout`, or tokens over a `constant` length."""
    constant_tokens: int = 1024
    """For `normaliser=constant`: the length that stands for every rollout (Dr. GRPO)."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the policy that the run began with; 0 leaves it, and its second model, out."""

    def __post_init__(self) -> None:
        check_choices(
            self, {"objective": Objective, "ratio": Ratio, "importance": Importance, "normaliser": Normaliser}
        )
        at_least(self, clip_low=0, clip_high=0, importance_low=0, constant_tokens=1, kl_coef=0)
        if not self.importance_high > self.importance_low:
            raise ValueError(f"importance_high={self.importance_high}: must be more than importance_low")


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The critic of PPO; used where `credit.estimator` asks for values."""

    backbone: Backbone = "own"
    """A model of its `own`, a copy of the first policy's, or a second head on the `policy`'s."""
    lr: float = 2e-4
    """Peak learning rate of the critic's own parameters."""
    value_coef: float = 0.5
    """Weight of the value loss beside that of the policy; matters where they share a backbone."""
    value_clip: float = 0.2
    """A value gains nothing by moving further than this from what it was before the step, in units of normalised
    return; 0 leaves clipping out.
    """
    warmup_steps: int = 0
    """First steps, in which only the critic learns; the policy's own warm-up begins after them."""
    normalise_returns: bool = True
    """Values are learned in units of the returns' running mean and std."""

    def __post_init__(self) -> None:
        check_choices(self, {"backbone": Backbone})
        at_least(self, lr=0, value_coef=0, value_clip=0, warmup_steps=0)


def check_choices(settings: object, allowed: Mapping[str, Any]) -> None:
    """ValueError for a value that is none of those of its `Literal`."""
    for key, choices in allowed.items():
        if getattr(settings, key) not in get_args(choices):
            raise ValueError(f"{key}={getattr(settings, key)!r}: allowed are {', '.join(get_args(choices))}")


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """How a step's rollouts become an update of the policy. The defaults are the recipe for the tiny policy on CPU."""

    lr: float = 2e-4
    """Peak learning rate of AdamW; 0 is the control that learns nothing."""
    warmup_steps: int = 3
    """Steps over which `lr` rises in a line, the first one included; a policy that waits for its critic begins then."""
    schedule: Schedule = "constant"
    """After the warm-up: `constant`, or `linear` down to 0 after the last step."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    epochs: int = 4
    """Optimizer updates per step, each over all of its tokens. The first one has a ratio of exactly 1, which no bound
    clips.
    """
    loss: LossSettings = field(default_factory=LossSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    token_budget: int | None = None
    """Most tokens in one row, each shared one counted once. A tree over it is cut at forks; a path over it is refused
    and counted. None: the engine's context window, or 16,384 where that is less, for longer rows share more.
    """
    logit_chunk: int = 4096
    """Trained tokens whose logits exist at a time."""
    precision: Precision = "32-true"
    """`bf16-mixed` computes in bf16, and keeps weights, gradients and optimizer in fp32."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time."""
    accelerator: Accelerator = "auto"
    """Of Lightning's Trainer."""
    num_threads: int = 0
    """Threads of torch; 0 leaves torch's own choice. One is faster than two on a busy two-core machine."""
    checkpoint_every: int = 1
    """Steps between checkpoints. A resume makes the steps since the last one again, from the same data. A checkpoint
    is three times the policy in fp32 (48 GB at 4B parameters, as much again for a critic): a larger policy wants more.
    """
    max_staleness: int = 0
    """Steps that the policy which draws is behind the one that is updated. 0: a step is collected after the one before
    it is learned. 1: while that is learned. A token of an older policy does not train, and is counted.
    """
    devices: int = 1
    """Processes on each host that share the learner (FSDP); each has a GPU of its own, or its share of the cores."""
    num_nodes: int = 1
    """Hosts that share the learner: more than one are those of the Slurm job that the campaign runs in."""
    keep_checkpoints: int = 2
    """Newest checkpoints that stay; each holds weights, optimizer and random state."""
    keep_policies: int | None = None
    """Newest PolicyVersions that stay, and `max_staleness` more, which a step ahead may need; None: all. The first one
    always stays. Each is the policy in fp32 (16 GB at 4B parameters): a run of a larger policy wants few.
    """
    keep_policy_every: int = 0
    """Of the older ones, each whose step is a multiple of this stays, to be evaluated; 0: none."""
    seed: int = 0
    wandb: WandbMode = "offline"
    """Mode of Weights & Biases; the CSV log is always written."""

    def __post_init__(self) -> None:
        choices = {"schedule": Schedule, "precision": Precision, "accelerator": Accelerator, "wandb": WandbMode}
        check_choices(self, choices)
        at_least(self, lr=0, warmup_steps=0, weight_decay=0, num_threads=0, seed=0, max_staleness=0)
        at_least(self, epochs=1, logit_chunk=1, devices=1, num_nodes=1, checkpoint_every=1, keep_checkpoints=1)
        at_least(self, keep_policy_every=0)
        if self.keep_policies is not None:
            at_least(self, keep_policies=2)  # a worker that is late may be loading the one before the newest
        if self.token_budget is not None:
            at_least(self, token_budget=1)
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}: must be more than 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each must be at least 0 and less than 1")
        if self.seed >= NUM_SEEDS:
            raise ValueError(f"seed={self.seed}: must be less than {NUM_SEEDS}")

    @property
    def mixed(self) -> bool:
        """Layers are computed in another precision than that of the weights."""
        return self.precision == "bf16-mixed"

    @property
    def row_tokens(self) -> int:
        """The budget of a row."""
        return LEAST_ROW if self.token_budget is None else self.token_budget

    def keeps_policy(self, step: int, *, newest: int) -> bool:
        """PolicyVersion `step` stays once that of step `newest` is published."""
        if self.keep_policies is None or step > newest - self.keep_policies - self.max_staleness:
            return True
        return step == 0 or (bool(self.keep_policy_every) and step % self.keep_policy_every == 0)

    def for_context(self, window: int) -> LearnerSettings:
        """With a row that holds any conversation of `window` tokens, unless `token_budget` says otherwise."""
        return self if self.token_budget is not None else replace(self, token_budget=max(window, LEAST_ROW))


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


@dataclass(frozen=True, kw_only=True)
class SftSettings:
    """Which recorded rollouts sft imitates, and how. Without `runs` it makes the policy of a cold start."""

    runs: tuple[str, ...] = ()
    """Folders of runs: training, evaluations, cold starts; of a policy, of the oracle, or of a model behind an API."""
    min_reward: float = 1.0
    """At least, of a rollout that is imitated; the verifier's own, before shaping."""
    per_task: int = 0
    """Most rollouts of one task in one harness, those of the highest reward; 0 for all."""
    epochs: int = 3
    """How often each rollout is imitated."""
    batch_size: int = 16
    """Rollouts of one update."""
    lr: float = 2e-4
    """Peak learning rate of AdamW; it falls in a line to 0 after the last update."""
    warmup_steps: int = 5
    normaliser: Normaliser = "token"
    """See `LossSettings`."""
    heldout_share: float = 0.1
    """Of the tasks, whose rollouts are kept apart: the loss on them is reported. Of two tasks or more, one at least."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self, {"normaliser": Normaliser})
        at_least(self, min_reward=0, per_task=0, epochs=1, batch_size=1, lr=0, warmup_steps=0, heldout_share=0, seed=0)
        if self.heldout_share >= 1:
            raise ValueError(f"heldout_share={self.heldout_share}: must be less than 1")
