"""The loss of the critic and the unit in which it learns."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clawhpc.learner.losses import value_loss
from clawhpc.learner.value_scale import KEEP, LEAST_VARIANCE, ReturnScale, moments


def value_gradient(value: float, old: float, clip: float, weight: float = 1.0) -> tuple[float, float, float]:
    """Loss, gradient and clip share of one token whose return is 1."""
    values = torch.tensor([value], requires_grad=True)
    loss, sums = value_loss(values, torch.tensor([old]), torch.ones(1), torch.tensor([weight]), clip)
    loss.backward()
    assert sums["value_loss"] == loss
    return loss.item(), values.grad.item(), sums["value_clip_share"].item()


@pytest.mark.parametrize(
    ("value", "old", "clip", "expected"),
    [
        (0.5, 0.4, 0.0, (0.125, -0.5, 0)),
        (0.9, 0.0, 0.0, (0.005, -0.1, 0)),
        (0.1, 0.0, 0.2, (0.405, -0.9, 0)),
        (0.9, 0.0, 0.2, (0.32, 0.0, 1)),
        (-0.5, 0.0, 0.2, (1.125, -1.5, 0)),
    ],
)
def test_a_value_gains_nothing_beyond_its_clip_and_is_pulled_back_when_it_went_the_wrong_way(
    value: float, old: float, clip: float, expected: tuple[float, float, float]
) -> None:
    assert value_gradient(value, old, clip) == pytest.approx(expected, abs=1e-6)


def test_the_value_loss_is_weighted_and_weight_0_is_not_counted() -> None:
    assert value_gradient(0.9, 0.0, 0.2, weight=0.5)[0] == pytest.approx(0.16)
    assert value_gradient(0.9, 0.0, 0.2, weight=0.0) == (0.0, 0.0, 0.0)
    assert value_gradient(1e30, 0.0, 0.2, weight=0.0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_no_tokens_give_value_loss_0(clip: float) -> None:
    values = torch.zeros(0, requires_grad=True)
    nothing = torch.zeros(0)
    loss, sums = value_loss(values, nothing, nothing, nothing, clip)
    loss.backward()
    assert values.grad is not None
    assert [loss.item(), *(value.item() for value in sums.values())] == [0.0, 0.0, 0.0]


def scale_after(*steps: Tensor, enabled: bool = True) -> ReturnScale:
    scale = ReturnScale(enabled=enabled)
    for returns in steps:
        scale.update(*moments(returns))
    return scale


def test_before_the_first_return_and_when_switched_off_the_scale_is_the_identity() -> None:
    values = torch.tensor([-3.0, 0.5, 100.0])
    for scale in (scale_after(), scale_after(torch.zeros(0)), scale_after(values, values, enabled=False)):
        assert torch.equal(scale.normalise(values), values)
        assert torch.equal(scale.restore(values), values)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_one_step_is_brought_to_mean_0_and_std_1(values: list[float]) -> None:
    returns = torch.tensor(values, dtype=torch.float64)
    scale = scale_after(returns)
    normal = scale.normalise(returns)
    assert normal.mean().item() == pytest.approx(0.0, abs=1e-9)
    if returns.var(correction=0) > 1.01 * LEAST_VARIANCE:
        assert normal.std(correction=0).item() == pytest.approx(1.0)
    torch.testing.assert_close(scale.restore(normal), returns)


def test_equal_returns_are_not_blown_up() -> None:
    scale = scale_after(torch.full((5,), 0.7))
    assert scale.std.item() == pytest.approx(LEAST_VARIANCE**0.5)
    assert scale.mean.item() == pytest.approx(0.7)


def test_later_steps_weigh_a_little_more_and_their_size_does_not_matter() -> None:
    scale = scale_after(torch.zeros(100), torch.ones(3))
    assert scale.mean.item() == pytest.approx(1 / (1 + KEEP))
    assert scale.std.item() == pytest.approx(0.5, abs=1e-4)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9), st.integers(0, 9))
def test_the_moments_of_ranks_add_up_to_those_of_the_step(values: list[float], cut: int) -> None:
    returns = torch.tensor(values)
    torch.testing.assert_close(moments(returns[:cut]) + moments(returns[cut:]), moments(returns))


def test_a_checkpoint_holds_the_scale() -> None:
    scale, resumed = scale_after(torch.arange(4.0)), ReturnScale()
    resumed.load_state_dict(scale.state_dict())
    values = torch.randn(3)
    assert torch.equal(resumed.normalise(values), scale.normalise(values))
    assert not list(scale.parameters())


def test_values_keep_their_dtype() -> None:
    scale = scale_after(torch.arange(4.0))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = torch.ones(2, dtype=dtype)
        assert scale.normalise(values).dtype == scale.restore(values).dtype == dtype
