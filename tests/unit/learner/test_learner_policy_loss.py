"""Each named objective against a few lines written from its paper, and what all of them have in common.

The gradient of a reference is autograd's; rows are in float64, so that the two agree to rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clawhpc.learner.losses import Paths, Sums, policy_loss, token_weights
from clawhpc.learner.settings import LossSettings

DEFAULT = LossSettings()
EVERY_KIND = [
    LossSettings(objective=objective, ratio=ratio, importance=importance, importance_low=0.5)
    for objective, ratio, importance in itertools.product(("clip", "cispo"), ("token", "path"), ("truncate", "mask"))
]


@dataclass
class Row:
    """What a loss is given."""

    learner: Tensor
    old: Tensor
    sampling: Tensor
    advantages: Tensor
    weights: Tensor
    paths: Paths | None = None
    reference: Tensor | None = None

    def loss(self, settings: LossSettings = DEFAULT) -> tuple[Tensor, Sums]:
        return policy_loss(
            self.learner,
            self.old,
            self.sampling,
            self.advantages,
            self.weights,
            settings,
            paths=self.paths,
            reference_logprobs_N=self.reference,
        )

    def part(self, start: int, stop: int) -> Row:
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Row(**{name: value[start:stop] for name, value in tensors.items() if isinstance(value, Tensor)})


def random_row(seed: int, num_tokens: int = 12, *, update: float = 0.5) -> Row:
    """Log-ratios of the update spread by `update`, those of engine and learner by 0.5."""
    torch.manual_seed(seed)
    old = -torch.rand(num_tokens, dtype=torch.float64) * 3 - 0.5
    return Row(
        learner=(old + update * torch.randn_like(old)).requires_grad_(),
        old=old,
        sampling=old + 0.5 * torch.randn_like(old),
        advantages=torch.randn_like(old),
        weights=torch.rand_like(old) / num_tokens + 0.01,
        reference=old + 0.3 * torch.randn_like(old),
    )


def paths_of(paths: Sequence[Sequence[int]]) -> Paths:
    return Paths(
        path_K=torch.tensor([number for number, path in enumerate(paths) for _ in path], dtype=torch.long),
        token_K=torch.tensor([token for path in paths for token in path], dtype=torch.long),
        num_paths=len(paths),
    )


FORK = ((0, 1, 2, 3), (0, 1, 4, 5, 6, 7), (0, 8, 9, 10, 11))
"""Three paths through twelve tokens; the first is on all of them, the second on two."""


def assert_same(row: Row, settings: LossSettings, expected: Tensor) -> None:
    """Loss and gradient of `row` are those of `expected`, which was computed from the same `row.learner`."""
    loss, sums = row.loss(settings)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    assert sums["loss"] == loss
    (gradient,) = torch.autograd.grad(loss, row.learner)
    (reference,) = torch.autograd.grad(expected, row.learner)
    torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-12)


def ppo(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.28) -> Tensor:
    """PPO, arXiv 1707.06347, eq. 7, per token; two bounds: DAPO, arXiv 2503.14476, eq. 8."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def truncated(row: Row) -> Tensor:
    return (row.old - row.sampling).exp().clamp(max=2.0)


seeds = st.integers(0, 2**31)


@given(seeds)
def test_clipping_is_that_of_ppo_with_two_bounds(seed: int) -> None:
    row = random_row(seed)
    ratio = (row.learner - row.old).exp()
    row.reference = None
    assert_same(row, DEFAULT, -(row.weights * truncated(row) * ppo(ratio, row.advantages)).sum())


@pytest.mark.parametrize("normaliser", ["rollout", "token", "constant"])
@given(seed=seeds)
def test_grpo_dapo_and_dr_grpo_differ_in_their_denominators(normaliser: str, seed: int) -> None:
    lengths, constant, beta = [2, 7, 3], 50, 0.04
    row = random_row(seed)
    row.sampling = row.old
    shares = token_weights(lengths, normaliser, constant)
    row.weights = torch.tensor(
        [share for share, length in zip(shares, lengths, strict=True) for _ in range(length)], dtype=torch.float64
    )
    # GRPO (arXiv 2402.03300) eq. 3 and 4; Dr. GRPO (arXiv 2503.20783) section 3; DAPO (arXiv 2503.14476) eq. 8
    objective = torch.zeros((), dtype=torch.float64)
    for output in torch.arange(12).split(lengths):
        learner, reference = row.learner[output], row.reference[output]
        kl = (reference - learner).exp() - (reference - learner) - 1
        terms = ppo((learner - row.old[output]).exp(), row.advantages[output], 0.2, 0.2) - beta * kl
        denominator = {"rollout": 3 * len(output), "token": sum(lengths), "constant": 3 * constant}[normaliser]
        objective = objective + terms.sum() / denominator
    settings = LossSettings(clip_high=0.2, normaliser=normaliser, constant_tokens=constant, kl_coef=beta)
    assert_same(row, settings, -objective)


@given(seeds)
def test_gspo_has_one_ratio_for_each_rollout(seed: int) -> None:
    lengths, low, high = [2, 7, 3], 0.03, 0.04
    row = random_row(seed, update=0.1)
    row.sampling, row.reference = row.old, None
    shares = token_weights(lengths, "rollout", 1)
    advantages = row.advantages[:3]
    row.advantages = advantages.repeat_interleave(torch.tensor(lengths))
    row.weights = torch.tensor(shares, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
    outputs = torch.arange(12).split(lengths)
    row.paths = paths_of([output.tolist() for output in outputs])
    # GSPO (arXiv 2507.18071) section 4.1
    ratios = torch.stack([(row.learner[output] - row.old[output]).mean().exp() for output in outputs])
    settings = LossSettings(ratio="path", clip_low=low, clip_high=high)
    assert_same(row, settings, -ppo(ratios, advantages, low, high).mean())


@given(seeds)
def test_on_a_tree_each_path_has_a_ratio_and_a_shared_token_its_part_of_the_weight(seed: int) -> None:
    low, high = 0.05, 0.1
    row = random_row(seed, update=0.2)
    row.reference = None
    copies = {token: sum(token in path for path in FORK) for token in range(12)}
    # GSPO-token (arXiv 2507.18071) section 4.3
    expected = torch.zeros((), dtype=torch.float64)
    for path in FORK:
        mean = torch.stack([row.learner[token] - row.old[token] for token in path]).mean().exp().detach()
        for token in path:
            ratio = mean * row.learner[token].exp() / row.learner[token].exp().detach()
            weight = row.weights[token] * truncated(row)[token] / copies[token]
            expected = expected - weight * ppo(ratio, row.advantages[token], low, high)
    row.paths = paths_of(FORK)
    assert_same(row, LossSettings(ratio="path", clip_low=low, clip_high=high), expected)


@pytest.mark.parametrize("objective", ["clip", "cispo"])
def test_a_shared_token_gains_no_weight_from_the_paths_through_it(objective: str) -> None:
    row = random_row(0)
    row.old = row.sampling = row.learner.detach()
    row.reference, row.paths = None, paths_of(FORK)
    loss, _ = row.loss(LossSettings(objective=objective, ratio="path"))
    (gradient,) = torch.autograd.grad(loss, row.learner)
    torch.testing.assert_close(gradient, -row.weights * row.advantages)


@given(seeds)
def test_a_path_of_one_token_has_the_ratio_of_its_token(seed: int) -> None:
    row = random_row(seed)
    row.paths = paths_of([(token,) for token in range(12)])
    assert_same(row, LossSettings(ratio="path"), row.loss(DEFAULT)[0])


@given(seeds)
def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token(seed: int) -> None:
    row = random_row(seed, update=2.0)
    row.reference = None
    # CISPO (arXiv 2506.13585) eq. 4 and 5, without a lower bound
    weight = (row.learner - row.old).exp().clamp(max=1 + 0.28).detach()
    expected = -(row.weights * truncated(row) * weight * row.advantages * row.learner).sum()
    settings = LossSettings(objective="cispo", clip_low=1.0)
    assert_same(row, settings, expected)
    (gradient,) = torch.autograd.grad(row.loss(settings)[0], row.learner)
    assert gradient.all()


def one_token(
    settings: LossSettings = DEFAULT, *, ratio: float = 1.0, advantage: float = 1.0, importance: float = 1.0
) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient and sums of one token of weight 1."""
    old = torch.tensor([-1.0])
    learner = (old + math.log(ratio)).requires_grad_()
    row = Row(learner, old, old - math.log(importance), torch.tensor([advantage]), torch.ones(1), paths_of([(0,)]))
    loss, sums = row.loss(settings)
    loss.backward()
    return loss.item(), learner.grad.item(), {name: value.item() for name, value in sums.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.56, 0.0, 1),
        (0.5, 2.0, -1.0, -1.0, 0),
        (1.5, -2.0, 3.0, 3.0, 0),
        (0.5, -2.0, 1.6, 0.0, 1),
        (1.25, 2.0, -2.5, -2.5, 0),
    ],
)
@pytest.mark.parametrize("kind", ["token", "path"])
def test_the_clip_stops_only_what_goes_further_the_same_way(
    kind: str, ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    got = one_token(LossSettings(ratio=kind), ratio=ratio, advantage=advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-5)
    assert got[2]["clip_share"] == clipped


@pytest.mark.parametrize(
    ("importance", "truncate", "mask", "outside"),
    [(0.3, 0.5, 0.0, 1), (0.7, 0.7, 0.7, 0), (1.0, 1.0, 1.0, 0), (1.9, 1.9, 1.9, 0), (3.0, 2.0, 0.0, 1)],
)
def test_an_importance_weight_out_of_bounds_is_the_bound_or_nothing(
    importance: float, truncate: float, mask: float, outside: int
) -> None:
    for kind, factor in (("truncate", truncate), ("mask", mask)):
        settings = LossSettings(importance=kind, importance_low=0.5)
        loss, gradient, sums = one_token(settings, ratio=1.1, advantage=2.0, importance=importance)
        assert (loss, gradient) == pytest.approx((-2.2 * factor, -2.2 * factor), rel=1e-5, abs=1e-12)
        assert sums["truncated_share"] == outside
        assert sums["sampling_gap_max"] == pytest.approx(abs(math.log(importance)), abs=1e-6)


def test_the_kl_term_is_reported_and_pulls_towards_the_reference() -> None:
    row = random_row(0)
    row.reference, row.advantages = row.old - 1.0, torch.zeros(12)
    row.learner = row.old.clone().requires_grad_()
    loss, sums = row.loss(LossSettings(kl_coef=0.5))
    assert sums["reference_kl"].item() == pytest.approx(12 * math.exp(-1))
    (gradient,) = torch.autograd.grad(loss, row.learner)
    torch.testing.assert_close(gradient, 0.5 * row.weights * (1 - math.exp(-1)))
    row.reference = None
    assert "reference_kl" not in row.loss()[1]


@given(seeds, st.integers(0, 12))
def test_rows_add_up_however_the_tokens_are_split(seed: int, cut: int) -> None:
    row = random_row(seed)
    settings = LossSettings(kl_coef=0.1)
    parts = [row.part(0, cut).loss(settings), row.part(cut, 12).loss(settings)]
    assert_same(row, settings, parts[0][0] + parts[1][0])
    for name, whole in row.loss(settings)[1].items():
        both = [sums[name] for _, sums in parts]
        torch.testing.assert_close(max(both) if name.endswith("_max") else sum(both), whole)


@pytest.mark.parametrize("settings", [*EVERY_KIND, LossSettings(importance_low=1.5)])
def test_a_token_of_weight_0_changes_nothing_whatever_its_numbers(settings: LossSettings) -> None:
    row = random_row(1)
    row.paths = paths_of(FORK)
    loss, sums = row.loss(settings)
    (gradient,) = torch.autograd.grad(loss, row.learner)
    dead = torch.tensor([-1e4, -1e-4, 0.0], dtype=torch.float64)
    more = Row(
        learner=torch.cat([row.learner.detach(), dead]).requires_grad_(),
        old=torch.cat([row.old, dead.flip(0)]),
        sampling=torch.cat([row.sampling, -dead.square()]),
        advantages=torch.cat([row.advantages, torch.ones(3)]),
        weights=torch.cat([row.weights, torch.zeros(3)]),
        paths=paths_of([*((*path, 12, 13) for path in FORK), (14,), ()]),
        reference=torch.cat([row.reference, dead.flip(0)]),
    )
    more_loss, more_sums = more.loss(settings)
    (more_gradient,) = torch.autograd.grad(more_loss, more.learner)
    torch.testing.assert_close(more_gradient, torch.cat([gradient, torch.zeros(3)]))
    torch.testing.assert_close(more_loss, loss)
    torch.testing.assert_close(more_sums, sums)


@pytest.mark.parametrize("settings", EVERY_KIND)
def test_no_tokens_give_loss_0_and_no_nan(settings: LossSettings) -> None:
    nothing = torch.zeros(0)
    learner = torch.zeros(0, requires_grad=True)
    loss, sums = Row(learner, nothing, nothing, nothing, nothing, paths_of([]), nothing).loss(settings)
    loss.backward()
    assert learner.grad is not None
    assert loss.item() == 0
    assert all(value.item() == 0 for value in sums.values())


@pytest.mark.parametrize("settings", EVERY_KIND)
@pytest.mark.parametrize(
    ("learner", "advantage"),
    [(-1e-3, 2.0), (-1e-3, 0.0), (-5e3, -2.0), (-5e3, 0.0), (-5e3, 2.0)],
)
def test_a_wild_step_leaves_what_is_clipped_finite(settings: LossSettings, learner: float, advantage: float) -> None:
    """Its ratio over- or underflows float32; only a ratio that grows against its advantage may truly be that large."""
    old = torch.tensor([-2e3, -2e3])
    row = Row(
        learner=torch.tensor([learner, learner], requires_grad=True),
        old=old,
        sampling=old - torch.tensor([0.0, 1e3]),
        advantages=torch.full((2,), advantage),
        weights=torch.full((2,), 0.5),
        paths=paths_of([(0, 1)]),
    )
    loss, _ = row.loss(settings)
    loss.backward()
    assert loss.isfinite()
    assert row.learner.grad.isfinite().all()
    if advantage == 0.0:
        assert not row.learner.grad.any()


def test_a_token_that_trains_and_is_on_no_path_is_a_bug() -> None:
    row = random_row(0)
    row.paths = paths_of(FORK[:2])
    with pytest.raises(AssertionError, match="is on a path"):
        row.loss(LossSettings(ratio="path"))
