"""Law 3: loss and gradient of the tree computation equal those of the per-path computation."""

import copy
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clawhpc.learner.attention import TreeLayout, use_tree_attention
from clawhpc.learner.batch import TreeBatch, build_batches
from clawhpc.learner.networks import TreeCritic, TreePolicy
from clawhpc.learner.settings import LossSettings
from clawhpc.tree.nodes import CallTree
from tests.fakes.learner_trees import (
    VOCAB,
    Forest,
    context,
    draw,
    forest,
    pack,
    per_path_loss,
    per_row_loss,
    plant,
    random_tree,
    tiny_model,
)

GRPO = LossSettings()
FAMILY = {
    "grpo": GRPO,
    "kl": LossSettings(kl_coef=0.1),
    "mask": LossSettings(importance="mask", importance_low=0.02, importance_high=30.0),
    "gspo": LossSettings(ratio="path", clip_low=3e-4, clip_high=4e-4),
    "cispo": LossSettings(objective="cispo", clip_low=1.0),
}
BUDGETS = (60, 100, 10_000)
"""From as much as the longest path needs to all in one row."""


def some_forest(depth: int = 4) -> Forest:
    return forest([random_tree(seed, depth=depth) for seed in range(3)])


class Learner:
    """A policy, and a critic where there is one, over trees or over paths."""

    def __init__(self, kind: str, dtype: torch.dtype, *, critic: str = "none", on_trees: bool) -> None:
        models = [tiny_model(kind, seed=seed, dtype=dtype) for seed in (0, 1)]
        if on_trees:
            for model in models:
                use_tree_attention(model)
        self.policy = TreePolicy(models[0], num_token_ids=VOCAB, logit_chunk=7, with_values=critic == "policy")
        self.critic = TreeCritic(models[1].base_model) if critic == "own" else None
        for head in (self.policy.value_head, self.critic and self.critic.value_head):
            if head is not None:
                nn.init.normal_(head.linear.weight, std=0.1, generator=torch.Generator().manual_seed(0))
                head.to(dtype)

    def parameters(self) -> dict[str, nn.Parameter]:
        of_critic = self.critic.named_parameters() if self.critic else ()
        return {f"policy.{name}": value for name, value in self.policy.named_parameters()} | {
            f"critic.{name}": value for name, value in of_critic
        }

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self.parameters().items()}

    def row_loss(self, rows: Sequence[TreeBatch], trees: Forest, loss: LossSettings, *, first: bool = True) -> Tensor:
        return per_row_loss(self.policy, self.critic, rows, trees.draws, loss, first=first)

    def path_loss(self, trees: Forest, loss: LossSettings, *, first: bool = True) -> Tensor:
        return per_path_loss(self.policy, self.critic, trees, loss, first=first)


def relative_gap(left: Tensor, right: Tensor) -> float:
    return ((left - right).norm() / right.norm().clamp(min=1e-12)).item()


def assert_equal(left: Learner, right: Learner, tolerance: float) -> None:
    ours, theirs = left.gradients(), right.gradients()
    for name, gradient in theirs.items():
        assert (ours[name] is None) == (gradient is None), name
        assert gradient is None or relative_gap(ours[name], gradient) < tolerance, name


def rows_of(trees: Forest, loss: LossSettings, budget: int = BUDGETS[-1]) -> list[TreeBatch]:
    return build_batches(trees.step_trees, token_budget=budget, with_paths=loss.ratio == "path")


@pytest.mark.parametrize("critic", ["none", "own", "policy"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize(("dtype", "tolerance", "lr"), [(torch.float64, 1e-9, 0.5), (torch.float32, 1e-5, 0.1)])
def test_tree_equals_paths_over_five_updates(
    kind: str, dtype: torch.dtype, tolerance: float, lr: float, critic: str
) -> None:
    trees = some_forest()
    left, right = (Learner(kind, dtype, critic=critic, on_trees=on_trees) for on_trees in (True, False))
    optimizers = [torch.optim.SGD(learner.parameters().values(), lr=lr) for learner in (left, right)]
    rows, of_rows, of_paths = rows_of(trees, GRPO), trees, copy.deepcopy(trees)
    for update in range(5):
        row_loss = left.row_loss(rows, of_rows, GRPO, first=not update)
        path_loss = right.path_loss(of_paths, GRPO, first=not update)
        row_loss.backward()
        path_loss.backward()
        # The loss is a mean of terms near 1 of either sign.
        assert row_loss.item() == pytest.approx(path_loss.item(), rel=tolerance, abs=tolerance)
        assert_equal(left, right, tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


random_trees = st.lists(st.builds(random_tree, st.integers(0, 10_000), depth=st.integers(1, 6)), min_size=1, max_size=3)


@given(random_trees, st.sampled_from(sorted(FAMILY)), st.sampled_from(["qwen3", "qwen3_moe"]), st.sampled_from(BUDGETS))
@settings(max_examples=25, deadline=None)
def test_tree_equals_paths_on_any_tree_with_any_loss_however_it_is_cut(
    trees: list[CallTree], name: str, kind: str, budget: int
) -> None:
    loss, whole = FAMILY[name], forest(trees)
    budget = BUDGETS[-1] if loss.ratio == "path" else budget
    left, right = (Learner(kind, torch.float64, critic="own", on_trees=on_trees) for on_trees in (True, False))
    rows = rows_of(whole, loss, budget)
    for first in (True, False):  # at the second look no ratio is 1
        row_loss, path_loss = left.row_loss(rows, whole, loss, first=first), right.path_loss(whole, loss, first=first)
        row_loss.backward()
        path_loss.backward()
        assert row_loss.item() == pytest.approx(path_loss.item(), rel=1e-9, abs=1e-9)
        assert_equal(left, right, 1e-9)
        for learner in (left, right):
            with torch.no_grad():
                for value in learner.parameters().values():
                    value -= 0 if value.grad is None else 0.3 * value.grad
                    value.grad = None


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_split_into_rows_changes_neither_loss_nor_gradient(budget: int) -> None:
    trees, found = some_forest(), []
    for rows in (rows_of(trees, GRPO, budget), rows_of(trees, GRPO)):
        learner = Learner("qwen3", torch.float32, critic="policy", on_trees=True)
        loss = learner.row_loss(rows, trees, GRPO)
        loss.backward()
        found.append((loss.item(), learner))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert_equal(found[0][1], found[1][1], 1e-5)


def test_merged_heads_save_tokens_and_change_nothing() -> None:
    trees = some_forest()
    merged = rows_of(trees, GRPO)
    apart = [row for tree in trees.step_trees for row in build_batches([tree], token_budget=BUDGETS[-1])]
    assert sum(row.num_tokens for row in merged) < sum(row.num_tokens for row in apart)
    learners = [Learner("qwen3", torch.float32, on_trees=True) for _ in range(2)]
    for learner, rows in zip(learners, (merged, apart), strict=True):
        learner.row_loss(rows, trees, GRPO).backward()
    assert_equal(*learners, 1e-5)


def row_logprobs(policy: TreePolicy, trees: Forest, temperature: float = 1.0) -> Tensor:
    (row,) = build_batches(trees.step_trees, token_budget=99, temperature=temperature)
    return policy(row).logprobs_N


def test_the_first_token_of_every_child_of_a_fork_is_predicted_from_the_fork() -> None:
    policy = Learner("qwen3", torch.float32, on_trees=True).policy
    tree = plant(context(1, 2, 3, below=[draw(4, 5), draw(6), context(7, below=[draw(8)]), draw(9, 1)]))
    logprobs_N = row_logprobs(policy, forest([tree]))
    with torch.no_grad():
        after = {
            path: policy.model(input_ids=torch.tensor([path]), tree_layout=TreeLayout.chain(len(path))).logits[0, -1]
            for path in [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 7), (1, 2, 3, 9)]
        }
    expected = [((1, 2, 3), 4), ((1, 2, 3, 4), 5), ((1, 2, 3, 7), 8), ((1, 2, 3), 9), ((1, 2, 3, 9), 1), ((1, 2, 3), 6)]
    by_hand = torch.stack([after[path].log_softmax(-1)[token] for path, token in expected])
    assert torch.allclose(logprobs_N, by_hand, atol=1e-5)


def test_log_probs_are_of_the_distribution_that_the_row_was_drawn_from() -> None:
    policy = Learner("qwen3", torch.float32, on_trees=True).policy
    logprobs_N = row_logprobs(policy, forest([plant(context(1, 2, 3, below=[draw(4)]))]), temperature=0.6)
    with torch.no_grad():
        logits_V = policy.model(input_ids=torch.tensor([(1, 2, 3)]), tree_layout=TreeLayout.chain(3)).logits[0, -1]
    assert torch.allclose(logprobs_N, (logits_V / 0.6).log_softmax(-1)[4], atol=1e-5)


@pytest.mark.parametrize("row", [pack([plant(context(1, 2), context(3, below=[draw()]))]), TreeBatch.empty()])
def test_rows_without_a_draw_give_loss_zero_and_gradient_zero(row: TreeBatch) -> None:
    learner, nothing = Learner("qwen3", torch.float32, critic="own", on_trees=True), forest([])
    loss = learner.row_loss([row], nothing, GRPO)
    loss.backward()
    assert loss.item() == 0
    assert all(gradient is not None and not gradient.any() for gradient in learner.gradients().values())
