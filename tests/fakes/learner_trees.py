"""Small trees and models for the tests of the learner, and the per-path computation that the tree must equal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
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
from clawhpc.learner.losses import Paths, policy_loss, value_loss
from clawhpc.learner.networks import TreeCritic, TreePolicy
from clawhpc.learner.settings import LossSettings
from clawhpc.records import VersionSpan
from clawhpc.tree.nodes import CallTree, Node

VOCAB = 40


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


@dataclass(frozen=True)
class Forest:
    """The trees of a step, and what is known of their draws."""

    trees: Sequence[CallTree]
    draws: Draws

    @property
    def step_trees(self) -> list[StepTree]:
        firsts = accumulate((tree.num_sampled_tokens for tree in self.trees), initial=0)
        return [StepTree.of(tree, first) for tree, first in zip(self.trees, firsts, strict=False)]


def forest(trees: Sequence[CallTree], advantages: Sequence[float] = ()) -> Forest:
    """Each tree with one advantage, or each draw with one of its own, and of every tree the token mean."""
    counts = [tree.num_sampled_tokens for tree in trees]
    total = sum(counts)
    logprobs = [value for tree in trees for node in tree.nodes for value in node.sampling_logprobs]
    of_trees = [
        advantage for advantage, count in zip(advantages, counts, strict=bool(advantages)) for _ in range(count)
    ]
    noise = torch.randn(4, total, dtype=torch.float64, generator=torch.Generator().manual_seed(total))
    return Forest(
        trees,
        Draws(
            sampling_logprobs=torch.tensor(logprobs, dtype=torch.float64),
            token_weight=torch.full((total,), 1 / max(1, total), dtype=torch.float64),
            advantages=torch.tensor(of_trees, dtype=torch.float64) if advantages else noise[0],
            returns=noise[1],
            old_values=noise[2] / 10,
            old_logprobs=torch.zeros(total, dtype=torch.float64),
            reference_logprobs=torch.tensor(logprobs, dtype=torch.float64) + noise[3] / 10,
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


@dataclass(frozen=True)
class TreePath:
    """A root-to-leaf path as a row of its own."""

    token_ids: tuple[int, ...]
    trained: list[int]
    """Where in it drawn tokens stand."""
    draws: list[int]
    """Which of the step's draws these are."""


def tree_paths(forest: Forest) -> list[TreePath]:
    """Every root-to-leaf path that has drawn tokens."""
    found = []
    for step_tree in forest.step_trees:
        tree = step_tree.tree
        for leaf in tree.leaves:
            nodes = [tree.nodes[step] for step in tree.path(leaf)]
            places = [
                (node.start + offset, step_tree.draw_of_call[node.call_id] + offset)
                for node in nodes
                if node.sampled
                for offset in range(len(node.token_ids))
            ]
            if places:
                found.append(TreePath(tree.path_token_ids(leaf), *map(list, zip(*places, strict=True))))
    return found


def per_path_loss(
    policy: TreePolicy, critic: TreeCritic | None, forest: Forest, loss: LossSettings, *, first: bool
) -> Tensor:
    """As if each path were a sample, by transformers' own attention: a copy has its token's credit, and its weight over
    the number of copies. Fills in the old log-probs of `forest` when it is the `first` update.
    """
    paths = tree_paths(forest)
    num_copies = Counter(draw for path in paths for draw in path.draws)
    outputs = [path_output(policy, path) for path in paths]
    if first:
        for path, (logprobs_N, _) in zip(paths, outputs, strict=True):
            forest.draws.old_logprobs[path.draws] = logprobs_N.detach().to(forest.draws.old_logprobs)
    total = torch.zeros(())
    for path, (logprobs_N, values_N) in zip(paths, outputs, strict=True):
        known = to_dtype(forest.draws.at(torch.tensor(path.draws)), logprobs_N.dtype)
        weight_N = known.token_weight / torch.tensor([num_copies[draw] for draw in path.draws])
        alone = Paths(
            path_K=torch.zeros(len(path.draws), dtype=torch.long), token_K=torch.arange(len(path.draws)), num_paths=1
        )
        term, _ = policy_loss(
            logprobs_N,
            known.old_logprobs,
            known.sampling_logprobs,
            known.advantages,
            weight_N,
            loss,
            paths=alone if loss.ratio == "path" else None,
            reference_logprobs_N=known.reference_logprobs,
        )
        if critic is not None:
            values_N = critic.value_head(states(critic.backbone, path))
        if values_N is not None:
            term = term + value_loss(values_N, known.old_values, known.returns, weight_N, VALUE_CLIP)[0]
        total = total + term
    return total


def path_output(policy: TreePolicy, path: TreePath) -> tuple[Tensor, Tensor | None]:
    """Log-probs, and values where the policy has them, of the drawn tokens of one path."""
    hidden_ND = states(policy.model.base_model, path)
    targets = torch.tensor([path.token_ids[at] for at in path.trained])
    logprobs_NV = policy.model.get_output_embeddings()(hidden_ND).log_softmax(-1)
    values_N = None if policy.value_head is None else policy.value_head(hidden_ND)
    return logprobs_NV.gather(-1, targets[:, None])[:, 0], values_N


def states(backbone: PreTrainedModel, path: TreePath) -> Tensor:
    """The hidden states from which the drawn tokens of a path are predicted."""
    hidden_BTD = backbone(input_ids=torch.tensor([path.token_ids]), use_cache=False).last_hidden_state
    return hidden_BTD[0, [at - 1 for at in path.trained]]


def per_row_loss(
    policy: TreePolicy,
    critic: TreeCritic | None,
    rows: Sequence[TreeBatch],
    draws: Draws,
    loss: LossSettings,
    *,
    first: bool,
) -> Tensor:
    """The same over packed rows, with the code that trains."""
    total = torch.zeros(())
    for row in rows:
        output = policy(row)
        if first:
            draws.old_logprobs[row.draw_N] = output.logprobs_N.detach().to(draws.old_logprobs)
        known = to_dtype(draws.at(row.draw_N), output.logprobs_N.dtype)
        term, _ = policy_loss(
            output.logprobs_N,
            known.old_logprobs,
            known.sampling_logprobs,
            known.advantages,
            known.token_weight,
            loss,
            paths=row.paths if loss.ratio == "path" else None,
            reference_logprobs_N=known.reference_logprobs,
        )
        values_N = output.values_N if critic is None else critic(row)
        if values_N is not None:
            term = term + value_loss(values_N, known.old_values, known.returns, known.token_weight, VALUE_CLIP)[0]
        total = total + term
    return total


def to_dtype(draws: Draws, dtype: torch.dtype) -> Draws:
    found = {field.name: getattr(draws, field.name) for field in fields(draws)}
    return Draws(**{name: None if value is None else value.to(dtype) for name, value in found.items()})


VALUE_CLIP = 0.2
