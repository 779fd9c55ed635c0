"""Small trees and models for the tests of the learner."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from clawhpc.learner.batch import Draws, StepTree, TreeBatch, pack_row
from clawhpc.records import VersionSpan
from clawhpc.tree.nodes import CallTree, Node

VOCAB = 40


@dataclass
class Sketch:
    """A tree to be: a draw, or context, and what comes below."""

    token_ids: tuple[int, ...]
    sampled: bool = False
    below: Sequence[Sketch] = field(default_factory=list)
    copied: Sketch | None = None
    """The draw that this is a grafted copy of."""


def context(*token_ids: int, below: Sequence[Sketch] = ()) -> Sketch:
    return Sketch(token_ids, below=below)


def draw(*token_ids: int, below: Sequence[Sketch] = ()) -> Sketch:
    return Sketch(token_ids, sampled=True, below=below)


def copy_of(drawn: Sketch, *, below: Sequence[Sketch] = ()) -> Sketch:
    return Sketch(drawn.token_ids, below=below, copied=drawn)


def plant(*roots: Sketch, rollout_id: str = "r", seed: int = 0) -> CallTree:
    """The CallTree of a sketch, with plausible sampling log-probs."""
    rng = random.Random(seed)
    nodes: list[Node] = []
    call_of: dict[int, int] = {}
    """By the identity of a draw's sketch."""
    stack: list[tuple[Sketch, int | None, int]] = [(root, None, 0) for root in reversed(roots)]
    while stack:
        sketch, parent_id, start = stack.pop()
        node_id, length = len(nodes), len(sketch.token_ids)
        call_of[id(sketch)] = node_id
        nodes.append(
            Node(
                node_id=node_id,
                parent_id=parent_id,
                start=start,
                token_ids=sketch.token_ids,
                sampled=sketch.sampled,
                sampling_logprobs=tuple(rng.uniform(-5, -2) for _ in range(length)) if sketch.sampled else (),
                weight_versions=(VersionSpan(version=3, start=0, end=length),) if sketch.sampled else (),
                call_id=node_id if sketch.sampled else None,
                continues_id=None if sketch.copied is None else call_of[id(sketch.copied)],
            )
        )
        stack.extend((child, node_id, start + length) for child in reversed(sketch.below))
    leaf_of_call = {node.call_id: node.node_id for node in nodes if node.call_id is not None}
    return CallTree(rollout_id=rollout_id, nodes=tuple(nodes), leaf_of_call=leaf_of_call)


def random_tree(seed: int, *, depth: int, head: tuple[int, ...] = (1, 2, 3, 4, 5), copies: bool = False) -> CallTree:
    """A head that all such trees share, then branches down to `depth` draws, with a fork at every level.

    `copies`: a draw may end its branch, and the conversation go on from a copy of it, as where a harness moves its last
    message.
    """
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(low, high)))

    def calls(depth: int) -> list[Sketch]:
        if depth == 0:
            return []
        moves = copies and depth > 1 and rng.random() < 0.5
        reply = draw(*tokens(1, 4), below=[] if moves else calls(depth - 1))
        deep = [context(*tokens(1, 3), below=[reply])]
        if moves:
            deep.append(copy_of(reply, below=calls(depth - 1)))
        shallow = [draw(*tokens(0, 3)) for _ in range(rng.randint(1, 2))]
        return [*deep, *shallow]

    tail = head + tokens(1, 2)
    return plant(context(*tail, below=calls(depth)), rollout_id=f"r{seed}", seed=seed)


@dataclass(frozen=True)
class Forest:
    """The trees of a step, and what is known of their draws."""

    trees: Sequence[CallTree]
    draws: Draws

    @property
    def step_trees(self) -> list[StepTree]:
        firsts = accumulate((tree.num_sampled_tokens for tree in self.trees), initial=0)
        return [StepTree.of(tree, first) for tree, first in zip(self.trees, firsts, strict=False)]


def forest(trees: Sequence[CallTree], dtype: torch.dtype = torch.float64) -> Forest:
    """Each draw with an advantage of its own, and a weight near that of a mean; one in five has none."""
    logprobs = [value for tree in trees for node in tree.nodes for value in node.sampling_logprobs]
    total = len(logprobs)
    generator = torch.Generator().manual_seed(total)
    weights = torch.rand(total, dtype=torch.float64, generator=generator) + 0.5
    weights[torch.rand(total, generator=generator) < 0.2] = 0.0
    return Forest(
        trees,
        Draws(
            sampling_logprobs=torch.tensor(logprobs, dtype=dtype),
            token_weight=(weights / max(1, total)).to(dtype),
            advantages=torch.randn(total, dtype=torch.float64, generator=generator).to(dtype),
            rewards=torch.rand(total, dtype=torch.float64, generator=generator).to(dtype),
        ),
    )


def pack(trees: Sequence[CallTree]) -> TreeBatch:
    """All in one row."""
    return pack_row(forest(trees).step_trees)


def tiny_model(kind: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Two layers with grouped queries; weights depend on `seed` alone."""
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=kind == "qwen3",
    )
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
    makers: dict[str, Callable[[], PreTrainedModel]] = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**shape)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)),
    }
    torch.manual_seed(seed)
    model = makers[kind]()
    if dtype == torch.float64:
        _widen(model)
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.to(dtype).train()


def _widen(model: PreTrainedModel) -> None:
    """Norms and routers in float64: those of transformers compute in float32 whatever comes in."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if hasattr(child, "variance_epsilon"):
                setattr(module, name, torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))
        if isinstance(module, Qwen3MoeTopKRouter):
            module.forward = partial(_route, module)


def _route(router: Qwen3MoeTopKRouter, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    weights, experts = logits.softmax(-1).topk(router.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True), experts
