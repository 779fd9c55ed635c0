"""Law 3: loss and gradient of the tree computation equal those of the per-path computation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from clawhpc.learner.attention import TreeLayout
from clawhpc.learner.batch import TreeBatch, build_batches
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.settings import CriticSettings, LearnerSettings, LossSettings
from tests.fakes.learner_paths import TEMPERATURE, Networks, PathLearner, TreeLearner, Update
from tests.fakes.learner_trees import Forest, context, draw, forest, pack, plant, random_tree

FAMILY = {
    "grpo": LossSettings(),
    "kl": LossSettings(kl_coef=0.1),
    "mask": LossSettings(importance="mask", importance_low=0.02, importance_high=30.0),
    "gspo": LossSettings(ratio="path", clip_low=3e-4, clip_high=4e-4),
    "cispo": LossSettings(objective="cispo", clip_low=1.0),
}
BUDGETS = (60, 100, 10_000)
"""From as much as the longest path needs to all in one row."""
TOLERANCE = {torch.float64: (1e-9, 0.0), torch.float32: (1e-5, 1e-6)}
"""Of any tree: relative, and for rounding."""
SETTINGS = LearnerSettings(
    lr=0.1,
    warmup_steps=2,
    epochs=3,
    max_grad_norm=1e9,
    critic=CriticSettings(lr=0.03, value_coef=0.7, value_clip=0.2),
)


def rows_of(trees: Forest, loss: LossSettings, budget: int = BUDGETS[-1]) -> list[TreeBatch]:
    budget = BUDGETS[-1] if loss.ratio == "path" else budget
    return build_batches(
        trees.step_trees, token_budget=budget, temperature=TEMPERATURE, with_paths=loss.ratio == "path"
    )


def assert_equal(ours: Sequence[Update], theirs: Sequence[Update], tolerance: float, rounding: float = 0.0) -> None:
    """Each loss, relative to the size of its terms, which are of either sign, and the gradient of each parameter.

    `rounding`: what a parameter's gradient may be off beside, relative to all gradients together: where nearly nothing
    is left of what its tokens add up to, the rounding of these is not small.
    """
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our.loss == pytest.approx(their.loss, rel=0, abs=tolerance * their.size)
        floor = rounding * total_norm(their)
        for name, gradient in their.gradients.items():
            found = our.gradients[name]
            assert (found is None) == (gradient is None), (number, name)
            if gradient is not None:
                gap = (found - gradient).norm().item()
                assert gap <= max(1e-12, tolerance * gradient.norm().item() + floor), (number, name, gap)


def total_norm(update: Update) -> float:
    return sum(gradient.norm().item() ** 2 for gradient in update.gradients.values() if gradient is not None) ** 0.5


KINDS, CRITICS = ("qwen3", "llama", "qwen3_moe"), ("none", "own", "policy")
CASES = [
    (number, kind, critic, (torch.float64, torch.float32)[number % 2], sorted(FAMILY)[number % len(FAMILY)])
    for number, (kind, critic) in enumerate(itertools.product(KINDS, CRITICS))
]
"""Every kind of model with every critic, each of them in both precisions, and every loss."""
random_trees = st.lists(st.tuples(st.integers(0, 9999), st.integers(1, 6), st.booleans()), min_size=1, max_size=2)
"""Of each: seed, depth, whether its conversations go on from copies."""


@pytest.mark.parametrize(("number", "kind", "critic", "dtype", "loss"), CASES)
@given(
    steps=st.tuples(random_trees, random_trees),
    budget=st.sampled_from(BUDGETS),
    critic_warmup=st.booleans(),
    normalise=st.booleans(),
)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,  # a float32 ratio at its very bound may fall to either side of it
    phases=[Phase.generate],  # to make an example smaller takes minutes
)
def test_two_steps_of_three_updates_over_trees_are_those_over_their_paths(
    number: int,
    kind: str,
    critic: str,
    dtype: torch.dtype,
    loss: str,
    steps: tuple[list[tuple[int, int, bool]], ...],
    budget: int,
    critic_warmup: bool,
    normalise: bool,
) -> None:
    of_critic = replace(SETTINGS.critic, warmup_steps=int(critic_warmup), normalise_returns=normalise)
    learns = replace(SETTINGS, loss=FAMILY[loss], critic=of_critic)
    left = TreeLearner(learns, Networks.make(kind, dtype, critic, on_trees=True))
    right = PathLearner(learns, Networks.make(kind, dtype, critic, on_trees=False))
    for step, trees in enumerate(steps):
        seeds = [(seed + 10_000 * number, depth, copies) for seed, depth, copies in trees]  # each case has its own
        whole = forest([random_tree(seed, depth=depth, copies=copies) for seed, depth, copies in seeds], dtype)
        ours, theirs = left.learn(step, whole, rows_of(whole, learns.loss, budget)), right.learn(step, whole)
        assert_equal(ours, theirs, *TOLERANCE[dtype])


def some_forest() -> Forest:
    return forest([random_tree(seed, depth=4, copies=seed == 1) for seed in range(3)], torch.float32)


@pytest.mark.parametrize(("kind", "critic"), [("qwen3", "policy"), ("llama", "none"), ("qwen3_moe", "own")])
def test_five_updates_in_float32_are_those_over_paths_parameter_by_parameter(kind: str, critic: str) -> None:
    learns, trees = replace(SETTINGS, epochs=5), some_forest()
    left = TreeLearner(learns, Networks.make(kind, torch.float32, critic, on_trees=True))
    right = PathLearner(learns, Networks.make(kind, torch.float32, critic, on_trees=False))
    assert_equal(left.learn(0, trees, rows_of(trees, learns.loss, 100)), right.learn(0, trees), 1e-5)


def updates_of(trees: Forest, rows: Sequence[TreeBatch], critic: str = "policy") -> list[Update]:
    return TreeLearner(SETTINGS, Networks.make("qwen3", torch.float32, critic, on_trees=True)).learn(0, trees, rows)


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_split_into_rows_changes_neither_loss_nor_gradient(budget: int) -> None:
    trees = some_forest()
    cut, whole = (updates_of(trees, rows_of(trees, SETTINGS.loss, tokens)) for tokens in (budget, BUDGETS[-1]))
    assert_equal(cut, whole, 1e-5)


def test_merged_heads_save_tokens_and_change_nothing() -> None:
    trees = some_forest()
    merged = rows_of(trees, SETTINGS.loss)
    apart = [
        row
        for tree in trees.step_trees
        for row in build_batches([tree], token_budget=BUDGETS[-1], temperature=TEMPERATURE)
    ]
    assert sum(row.num_tokens for row in merged) < sum(row.num_tokens for row in apart)
    assert_equal(updates_of(trees, apart), updates_of(trees, merged), 1e-5)


def row_logprobs(policy: TreePolicy, trees: Forest, temperature: float = 1.0) -> Tensor:
    (row,) = build_batches(trees.step_trees, token_budget=99, temperature=temperature)
    return policy(row).logprobs_N


def test_the_first_token_of_every_child_of_a_fork_is_predicted_from_the_fork() -> None:
    policy = Networks.make("qwen3", torch.float32, "none", on_trees=True).policy
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
    policy = Networks.make("qwen3", torch.float32, "none", on_trees=True).policy
    logprobs_N = row_logprobs(policy, forest([plant(context(1, 2, 3, below=[draw(4)]))]), temperature=0.6)
    with torch.no_grad():
        logits_V = policy.model(input_ids=torch.tensor([(1, 2, 3)]), tree_layout=TreeLayout.chain(3)).logits[0, -1]
    assert torch.allclose(logprobs_N, (logits_V / 0.6).log_softmax(-1)[4], atol=1e-5)


@pytest.mark.parametrize("critic", ["own", "policy"])
@pytest.mark.parametrize("row", [pack([plant(context(1, 2), context(3, below=[draw()]))]), TreeBatch.empty()])
def test_rows_without_a_draw_give_loss_zero_and_gradient_zero(row: TreeBatch, critic: str) -> None:
    for update in updates_of(forest([], torch.float32), [row], critic):
        assert update.loss == 0
        assert all(gradient is not None and not gradient.any() for gradient in update.gradients.values())
