"""Memory of the learner and of an engine, in bytes, from the shape of the policy.

Of the learner, on each of its R ranks, with P the parameters of a network, c the bytes of a number in computation (2 in
bf16, 4 in fp32), T the tokens of a row, and D, Q, K, F, V as in `decoder`:

    held      16 P / R for a network that learns (weights, gradients and AdamW's two moments, all in fp32), 4 P / R for
              the reference of a KL term
    gathered  where networks are sharded: two layers and what is outside of the layers, in c, each with a gradient in c
              and in fp32; else one more gradient of the embedding
    row       one layer's c' T, and with checkpointing c T D more for each layer, without it c' T for each layer
    c'        (4 c + 8) D + (5 c + 4) Q + (c + 4) K + 4 c F; with experts 2 c k D more, and k times what F takes:
              what autograd keeps of a layer, measured with transformers' Qwen3 and Qwen3-MoE
    logits    `logit_chunk` V 20: five times in fp32 on the way to log-probs, entropy and gradient

Ranks share the rows of a weight, and the experts of a layer, whole: P is R times what the rank with the most of them
has, also in what is gathered, but for the gradient in c.

The most at a time is held + gathered + (row + half a layer for its gradients, or row + logits), or AdamW's own 4 P / R
beside what is held. Policy and critic pass one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from clawhpc.credit.settings import CreditSettings
from clawhpc.estimate.decoder import Decoder, count_numbers
from clawhpc.estimate.settings import PlanSettings
from clawhpc.learner.settings import LearnerSettings
from clawhpc.serve.settings import EngineSettings

FP32 = 4
"""Bytes of a number, as the learner keeps it and publishes it."""
MOMENTS = 2
"""Numbers that AdamW keeps of a parameter."""
BYTES = {"float32": 4, "bfloat16": 2}
LOGITS = 5
"""So often there are those of a chunk at the same time."""
GATHERED_LAYERS = 2
"""FSDP gathers the next one while it computes one."""
GIB = float(1 << 30)


@dataclass(frozen=True, kw_only=True)
class Networks:
    """How many parameters the learner has to do with; among ranks, with what fills them up."""

    policy: int
    critic: int
    """Of a backbone of its own, and its head; or of a head on the policy; 0 without critic."""
    reference: int

    @property
    def learned(self) -> int:
        """Those that an optimizer moves."""
        return self.policy + self.critic


def count_networks(decoder: Decoder, learner: LearnerSettings, credit: CreditSettings, num_ranks: int = 1) -> Networks:
    """As `RlModule.configure_model` makes them, and shares them among `num_ranks`."""
    policy = count_numbers(decoder.weights, num_ranks)
    own = decoder.backbone_weights if learner.critic.backbone == "own" else ()
    critic = (*own, (1, decoder.hidden_size)) if credit.needs_critic else ()
    return Networks(
        policy=policy,
        critic=count_numbers(critic, num_ranks),
        reference=policy if learner.loss.kl_coef else 0,
    )


@dataclass(frozen=True, kw_only=True)
class LearnerMemory:
    """Of one rank, at the moment when it needs the most; bytes."""

    weights: float
    """Of policy and critic."""
    gradients: float
    moments: float
    reference: float
    gathered: float
    activations: float
    """What is kept of a row for the backward pass, with what the layer in work needs."""
    logits: float
    optimizer: float
    """AdamW's own, while it moves the weights; a row is gone by then."""

    @property
    def held(self) -> float:
        """All the time."""
        return self.weights + self.gradients + self.moments + self.reference

    @property
    def peak(self) -> float:
        """The most at a time."""
        return self.held + max(self.gathered + max(self.activations, self.logits), self.optimizer)


def learner_memory(decoder: Decoder, learner: LearnerSettings, credit: CreditSettings) -> LearnerMemory:
    """Of the rank with the largest part; `learner` knows its window (`for_context`)."""
    num_ranks = learner.devices * learner.num_nodes
    networks = count_networks(decoder, learner, credit, num_ranks)
    width = BYTES["bfloat16"] if learner.mixed else FP32
    part = FP32 * networks.learned / num_ranks
    layer = layer_activations(decoder, width) * learner.row_tokens
    inputs = width * decoder.hidden_size * learner.row_tokens
    kept = decoder.num_layers * (inputs if learner.gradient_checkpointing else layer)
    in_work = layer * (1.5 if learner.gradient_checkpointing else 0.5)
    sharded = num_ranks > 1 or learner.mixed
    logits = min(learner.logit_chunk, learner.row_tokens) * decoder.vocab_size * LOGITS * FP32
    return LearnerMemory(
        weights=part,
        gradients=part,
        moments=MOMENTS * part,
        reference=FP32 * networks.reference / num_ranks,
        gathered=gathered(decoder, width, num_ranks) if sharded else FP32 * decoder.embedding_params,
        activations=kept + in_work,
        logits=kept + logits,
        optimizer=part,
    )


def gathered(decoder: Decoder, width: int, num_ranks: int) -> float:
    """Of a sharded network, while a row passes: bytes. Only the gradients of the pass itself are not filled up."""
    weights = (*decoder.layer_weights * GATHERED_LAYERS, *decoder.outer_weights)
    return width * count_numbers(weights) + (width + FP32) * count_numbers(weights, num_ranks)


def layer_activations(decoder: Decoder, width: int) -> float:
    """c': what autograd keeps of a layer, for each token of a row."""
    chosen = max(1, decoder.num_chosen)
    copies = 2 * width * decoder.num_chosen
    return (
        (4 * width + 8 + copies) * decoder.hidden_size
        + (5 * width + 4) * decoder.query_width
        + (width + 4) * decoder.key_width
        + 4 * width * chosen * decoder.ffn_size
    )


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Main memory of the host of rank 0; bytes."""

    load: float
    """A network as it is read, before it is handed out."""
    publish: float
    """The policy whole, and once more as it is written."""
    checkpoint: float
    """Weights and moments of all that learns, whole, where they are in shards."""

    @property
    def peak(self) -> float:
        """The most at a time."""
        return max(self.load, self.publish, self.checkpoint)


def host_memory(decoder: Decoder, learner: LearnerSettings, credit: CreditSettings) -> HostMemory:
    """Of rank 0, which alone reads policies and writes them."""
    networks = count_networks(decoder, learner, credit)
    sharded = learner.devices * learner.num_nodes > 1 or learner.mixed
    whole = FP32 * (1 + MOMENTS) * networks.learned
    return HostMemory(
        load=FP32 * networks.policy,
        publish=2 * FP32 * networks.policy,
        checkpoint=whole if sharded else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Of each GPU of an engine, or of its host where it has none; bytes, and tokens."""

    available: float
    """The engine's share of the memory."""
    weights: float
    others: float
    """Activations and compiled graphs, as it is assumed."""
    token_bytes: float
    """Keys and values of one token."""

    @property
    def cache(self) -> float:
        """What is left for keys and values."""
        return max(0.0, self.available - self.weights - self.others)

    @property
    def cache_tokens(self) -> int:
        """As many tokens have their keys and values in one copy of the policy."""
        return int(self.cache / self.token_bytes)


def engine_memory(decoder: Decoder, engine: EngineSettings, plan: PlanSettings, *, on_gpu: bool) -> EngineMemory:
    """Of one copy of the policy."""
    width, tensor = BYTES[engine.dtype], engine.tensor_parallel_size
    kv_heads = ceil(decoder.num_kv_heads / tensor)  # a head is not divided: each GPU has one at least
    token_bytes = 2 * decoder.num_layers * kv_heads * decoder.head_dim * width
    weights = width * decoder.num_params / tensor
    cache = engine.kv_cache_gib * GIB  # on a CPU it is given, and weights come on top
    of_gpu = engine.gpu_memory_utilization * plan.gpu_memory_gib * GIB
    others = plan.engine_gib * GIB if on_gpu else 0.0
    return EngineMemory(
        available=of_gpu if on_gpu else weights + cache,
        weights=weights,
        others=others,
        token_bytes=token_bytes,
    )
