"""Law 3: loss and gradient of the tree computation equal those of the per-path computation."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from clawhpc.learner.attention import TreeLayout, use_tree_attention
from clawhpc.learner.batch import CreditedTree, TreeBatch, build_batches, pack_row
from clawhpc.learner.losses import grpo_loss
from clawhpc.learner.module import row_logprobs, with_old_logprobs
from clawhpc.learner.settings import LearnerSettings
from tests.fakes.learner_trees import CLIP, VOCAB, context, credit, draw, per_path_loss, plant, random_tree, tiny_model

SETTINGS = LearnerSettings(logit_chunk=7)


def forest(depth: int = 4) -> list[CreditedTree]:
    trees = [random_tree(seed, depth=depth) for seed in range(3)]
    return credit(trees, [1.3, -0.7, 0.4])


def rows_loss(model: PreTrainedModel, rows: list[TreeBatch]) -> tuple[Tensor, list[TreeBatch]]:
    total, known = torch.zeros(()), []
    for row in rows:
        logprobs_N, _ = row_logprobs(model, row, SETTINGS, VOCAB)
        if row.old_logprobs_BT is None:
            row = with_old_logprobs(row, logprobs_N.detach())
        at = row.sampled_BT
        loss, _ = grpo_loss(
            logprobs_N,
            row.old_logprobs_BT[at],
            row.sampling_logprobs_BT[at],
            row.advantages_BT[at],
            row.token_weight_BT[at],
            CLIP,
        )
        total, known = total + loss, [*known, row]
    return total, known


def relative_gap(left: Tensor, right: Tensor) -> float:
    return ((left - right).norm() / right.norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance", "lr"),
    [
        ("qwen3", torch.float64, 1e-9, 0.5),
        ("llama", torch.float64, 1e-9, 0.5),
        ("qwen3_moe", torch.float64, 1e-6, 0.5),  # its router computes in float32 whatever comes in
        ("qwen3", torch.float32, 1e-5, 0.1),
        ("llama", torch.float32, 1e-5, 0.1),
        ("qwen3_moe", torch.float32, 1e-5, 0.1),
    ],
)
def test_tree_equals_paths_over_five_updates(kind: str, dtype: torch.dtype, tolerance: float, lr: float) -> None:
    trees = forest()
    on_trees, on_paths = tiny_model(kind, dtype=dtype), tiny_model(kind, dtype=dtype)
    use_tree_attention(on_trees)
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model in (on_trees, on_paths)]
    rows, old = [pack_row(trees)], None
    for _ in range(5):
        tree_loss, rows = rows_loss(on_trees, rows)
        path_loss, old = per_path_loss(on_paths, trees, old)
        tree_loss.backward()
        path_loss.backward()
        assert tree_loss.item() == pytest.approx(path_loss.item(), rel=tolerance)
        for (name, left), (_, right) in zip(on_trees.named_parameters(), on_paths.named_parameters(), strict=True):
            assert relative_gap(left.grad, right.grad) < tolerance, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def gradients(model: PreTrainedModel, rows: list[TreeBatch]) -> dict[str, Tensor]:
    model.zero_grad()
    loss, _ = rows_loss(model, rows)
    loss.backward()
    return {"loss": loss.detach()} | {name: value.grad.clone() for name, value in model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(relative_gap(left[name], right[name]) < 1e-5 for name in left)


def test_neither_merged_heads_nor_rows_of_their_own_change_loss_or_gradient() -> None:
    model = tiny_model()
    use_tree_attention(model)
    trees = forest()
    merged, apart = [pack_row(trees)], [pack_row([tree]) for tree in trees]
    assert merged[0].num_tokens < sum(row.num_tokens for row in apart)
    assert same(gradients(model, merged), gradients(model, apart))


@pytest.mark.parametrize("budget", [60, 100, 10_000])
def test_the_split_into_rows_changes_neither_loss_nor_gradient(budget: int) -> None:
    model = tiny_model()
    use_tree_attention(model)
    rows = build_batches(forest(), token_budget=budget)
    assert same(gradients(model, rows), gradients(model, [pack_row(forest())]))


def test_the_first_token_of_every_child_of_a_fork_is_predicted_from_the_fork() -> None:
    model = tiny_model()
    use_tree_attention(model)
    tree = plant(context(1, 2, 3, below=[draw(4, 5), draw(6), context(7, below=[draw(8)]), draw(9, 1)]))
    logprobs_N, _ = row_logprobs(model, pack_row(credit([tree], [1.0])), SETTINGS, VOCAB)
    with torch.no_grad():
        after = {
            path: model(input_ids=torch.tensor([path]), tree_layout=TreeLayout.chain(len(path))).logits[0, -1]
            for path in [(1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 7), (1, 2, 3, 9)]
        }
    expected = [((1, 2, 3), 4), ((1, 2, 3, 4), 5), ((1, 2, 3), 6), ((1, 2, 3, 7), 8), ((1, 2, 3), 9), ((1, 2, 3, 9), 1)]
    by_hand = torch.stack([after[path].log_softmax(-1)[token] for path, token in expected])
    assert torch.allclose(logprobs_N, by_hand, atol=1e-5)


def test_log_probs_are_of_the_distribution_that_the_row_was_drawn_from() -> None:
    model = tiny_model()
    use_tree_attention(model)
    tree = credit([plant(context(1, 2, 3, below=[draw(4)]))], [1.0])
    logprobs_N, _ = row_logprobs(model, pack_row(tree, 0.6), SETTINGS, VOCAB)
    with torch.no_grad():
        logits_V = model(input_ids=torch.tensor([(1, 2, 3)]), tree_layout=TreeLayout.chain(3)).logits[0, -1]
    assert torch.allclose(logprobs_N, (logits_V / 0.6).log_softmax(-1)[4], atol=1e-5)


def test_rows_without_a_draw_give_loss_zero_and_gradient_zero() -> None:
    model = tiny_model()
    use_tree_attention(model)
    found = gradients(model, [pack_row(credit([plant(context(1, 2), context(3, below=[draw()]))], [1.0]))])
    assert not any(value.any() for value in found.values())
