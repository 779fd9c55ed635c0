import math

import pytest
import torch
from torch import nn

from clawhpc.learner.losses import chunked_logprobs, k3, sft_loss, token_weights


def test_k3_is_never_negative_and_its_mean_is_the_kl_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    log_ratio = (p / q).log()
    assert (k3(log_ratio) >= 0).all()
    assert (q * k3(log_ratio)).sum().item() == pytest.approx((q * (q / p).log()).sum().item(), rel=1e-5)


def test_no_token_gives_loss_zero_gradient_zero_and_no_nan() -> None:
    head, hidden = nn.Linear(4, 8), torch.randn(0, 4, requires_grad=True)
    logprobs, entropy = chunked_logprobs(
        hidden, torch.zeros(0, dtype=torch.long), head, temperature=1.0, num_token_ids=8, chunk=3
    )
    loss, _ = sft_loss(logprobs, torch.zeros(0))
    loss.backward()
    assert loss.item() == 0
    assert entropy.sum().item() == 0
    assert not head.weight.grad.any()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_log_probs_are_those_of_the_tempered_distribution_over_known_ids_whatever_the_chunk(chunk: int) -> None:
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(4, 10, bias=False), torch.randn(7, 4), torch.arange(7)
    logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature=0.6, num_token_ids=8, chunk=chunk)
    logits = head(hidden) / 0.6
    logits[:, 8:] = -torch.inf
    expected = torch.distributions.Categorical(logits=logits)
    assert torch.allclose(logprobs, expected.log_prob(targets), atol=1e-6)
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=logits[:, :8]).entropy(), atol=1e-5)


def test_chunks_change_no_gradient() -> None:
    torch.manual_seed(0)
    grads = []
    hidden, targets = torch.randn(7, 4), torch.arange(7)
    head = nn.Linear(4, 8)
    for chunk in (2, 100):
        head.zero_grad()
        logprobs, _ = chunked_logprobs(hidden, targets, head, temperature=1.0, num_token_ids=8, chunk=chunk)
        logprobs.square().sum().backward()
        grads.append(head.weight.grad.clone())
    assert torch.allclose(grads[0], grads[1], atol=1e-5)


def test_weights_of_all_tokens_add_up_to_one() -> None:
    counts = [3, 0, 5]
    assert token_weights(counts, "token", 1) == pytest.approx([1 / 8] * 3)
    by_rollout = token_weights(counts, "rollout", 1)
    assert by_rollout[0] * 3 == by_rollout[2] * 5 == pytest.approx(1 / 2)
    assert token_weights(counts, "constant", 10) == pytest.approx([1 / 20] * 3)


@pytest.mark.parametrize("normaliser", ["token", "rollout", "constant"])
def test_weights_of_nothing_are_finite(normaliser: str) -> None:
    assert all(math.isfinite(weight) for weight in token_weights([0, 0], normaliser, 10))
    assert token_weights([], normaliser, 10) == []


@pytest.mark.parametrize("normaliser", ["token", "rollout", "constant"])
def test_a_rollout_that_counts_twice_weighs_as_two_of_it(normaliser: str) -> None:
    once = token_weights([3, 3, 5, 0, 0], normaliser, 10)
    twice = token_weights([3, 5, 0], normaliser, 10, [2, 1, 2])
    assert twice[0] == pytest.approx(2 * once[0])
    assert twice[1] == pytest.approx(once[2])
    assert token_weights([3, 5], normaliser, 10, [4, 4]) == pytest.approx(token_weights([3, 5], normaliser, 10))


def test_imitation_is_the_weighted_cross_entropy() -> None:
    loss, _ = sft_loss(torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 0.25]))
    assert loss.item() == pytest.approx(1.25)
