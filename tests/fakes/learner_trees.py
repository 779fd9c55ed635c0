"""Small trees and models for the tests of the learner, and the per-path computation that the tree must equal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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

from clawhpc.learner.batch import CreditedTree
from clawhpc.learner.losses import Clip, grpo_loss
from clawhpc.records import VersionSpan
from clawhpc.tree.nodes import CallTree, Node

VOCAB = 40
CLIP = Clip(low=0.2, high=0.28, truncation=2.0)


@dataclass
class Sketch:
    """A tree to be: a draw, or context, and what comes below."""

    token_ids: tuple[int, ...]
    sampled: bool = False
    below: Sequence[Sketch] = field(default_factory=list)


def context(*token_ids: int, below: Sequence[Sketch] = ()) -> Sketch:
    return Sketch(token_ids, below=below)


def draw(*token_ids: int, below: Sequence[Sketch] = ()) -> Sketch:
    return Sketch(token_ids, sampled=True, below=below)


def plant(*roots: Sketch, rollout_id: str = "r", seed: int = 0) -> CallTree:
    """The CallTree of a sketch, with plausible sampling log-probs."""
    rng = random.Random(seed)
    nodes: list[Node] = []
    stack: list[tuple[Sketch, int | None, int]] = [(root, None, 0) for root in reversed(roots)]
    while stack:
        sketch, parent_id, start = stack.pop()
        node_id, length = len(nodes), len(sketch.token_ids)
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
            )
        )
        stack.extend((child, node_id, start + length) for child in reversed(sketch.below))
    leaf_of_call = {node.call_id: node.node_id for node in nodes if node.call_id is not None}
    return CallTree(rollout_id=rollout_id, nodes=tuple(nodes), leaf_of_call=leaf_of_call)


def random_tree(seed: int, *, depth: int, head: tuple[int, ...] = (1, 2, 3, 4, 5)) -> CallTree:
    """A head that all such trees share, then branches down to `depth` draws, with a fork at every level."""
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(low, high)))

    def calls(depth: int) -> list[Sketch]:
        if depth == 0:
            return []
        deep = context(*tokens(1, 3), below=[draw(*tokens(1, 4), below=calls(depth - 1))])
        shallow = [draw(*tokens(0, 3)) for _ in range(rng.randint(1, 2))]
        return [deep, *shallow]

    tail = head + tokens(1, 2)
    return plant(context(*tail, below=calls(depth)), rollout_id=f"r{seed}", seed=seed)


def credit(trees: Sequence[CallTree], advantages: Sequence[float]) -> list[CreditedTree]:
    """Token mean over all of `trees`."""
    weight = 1 / max(1, sum(tree.num_sampled_tokens for tree in trees))
    pairs = enumerate(zip(trees, advantages, strict=True))
    return [CreditedTree(tree=tree, rollout=i, advantage=a, token_weight=weight) for i, (tree, a) in pairs]


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
        _widen_norms(model)
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return model.to(dtype).train()


def _widen_norms(model: PreTrainedModel) -> None:
    """Norms in float64: those of transformers compute in float32 whatever comes in."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if hasattr(child, "variance_epsilon"):
                setattr(module, name, torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon))


@dataclass(frozen=True)
class Copy:
    """A sampled token as it stands on one path: row `at`, and where it stands in the tree."""

    at: int
    key: tuple[int, int, int]
    """(rollout, node_id, offset)"""
    sampling_logprob: float


def paths_of(trees: Sequence[CreditedTree]) -> list[tuple[CreditedTree, tuple[int, ...], list[Copy]]]:
    """Every root-to-leaf path that has sampled tokens, as a plain sequence."""
    found = []
    for tree in trees:
        for leaf in tree.tree.leaves:
            copies = [
                Copy(node.start + offset, (tree.rollout, node.node_id, offset), node.sampling_logprobs[offset])
                for node in (tree.tree.nodes[step] for step in tree.tree.path(leaf))
                if node.sampled
                for offset in range(len(node.token_ids))
            ]
            if copies:
                found.append((tree, tree.tree.path_token_ids(leaf), copies))
    return found


def path_logprobs(model: PreTrainedModel, token_ids: Sequence[int], copies: Sequence[Copy]) -> Tensor:
    """Log-probs of the sampled tokens of one path, by itself through transformers' own attention."""
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    of_next = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
    return of_next[[copy.at - 1 for copy in copies]]


OldLogprobs = dict[tuple[int, int, int], Tensor]


def per_path_loss(
    model: PreTrainedModel, trees: Sequence[CreditedTree], old: OldLogprobs | None
) -> tuple[Tensor, OldLogprobs]:
    """GRPO as if each path were a sample: a copy has its token's credit, and its weight over the number of copies."""
    paths = paths_of(trees)
    num_copies = Counter(copy.key for _, _, copies in paths for copy in copies)
    learner = [path_logprobs(model, token_ids, copies) for _, token_ids, copies in paths]
    if old is None:
        aligned = zip(paths, learner, strict=True)
        old = {
            copy.key: value.detach() for (_, _, copies), of in aligned for copy, value in zip(copies, of, strict=True)
        }
    loss = torch.zeros(())
    for (tree, _, copies), of_path in zip(paths, learner, strict=True):
        weight = torch.tensor(tree.token_weight).to(of_path)
        term, _ = grpo_loss(
            of_path,
            torch.stack([old[copy.key] for copy in copies]),
            torch.tensor([copy.sampling_logprob for copy in copies]),
            torch.tensor(tree.advantage),
            weight / torch.tensor([num_copies[copy.key] for copy in copies]),
            CLIP,
        )
        loss = loss + term
    return loss, old
