from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.records import Criterion, Opinion, Rubric
from clawhpc.verify.score import agreement, mean_scores, spread, weighted_mean

SCORE = st.floats(0, 1)
SCORES = st.lists(SCORE, min_size=1, max_size=6)


def rubric(weights: list[float]) -> Rubric:
    return Rubric(criteria=tuple(Criterion(name=f"n{at}", text="", weight=one) for at, one in enumerate(weights)))


def opinion(values: list[float]) -> Opinion:
    return Opinion(model="m", scores={f"n{at}": value for at, value in enumerate(values)})


def test_a_criterion_counts_by_its_weight() -> None:
    assert weighted_mean(rubric([3.0, 1.0]), {"n0": 1.0, "n1": 0.0}) == 0.75


@given(st.lists(st.tuples(st.floats(0.01, 100), SCORE), min_size=1, max_size=6), st.floats(0.01, 100))
def test_the_weighted_mean_lies_between_its_scores_whatever_the_unit_of_the_weights(
    pairs: list[tuple[float, float]], unit: float
) -> None:
    weights, values = [weight for weight, _ in pairs], [score for _, score in pairs]
    mean = weighted_mean(rubric(weights), opinion(values).scores)
    assert 0.0 <= mean <= 1.0
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9
    assert weighted_mean(rubric([weight * unit for weight in weights]), opinion(values).scores) == pytest.approx(mean)


@given(SCORES)
def test_agreement_is_from_0_to_1_and_whole_where_all_say_the_same(values: list[float]) -> None:
    assert agreement(values[:1]) is None
    assert agreement([values[0]] * 3) == 1.0
    if len(values) > 1:
        agreed = agreement(values)
        assert agreed is not None
        assert 0.0 <= agreed <= 1.0
        assert agreement(values[::-1]) == pytest.approx(agreed)


def test_agreement_is_one_minus_the_mean_difference_of_two() -> None:
    assert agreement([0.0, 1.0]) == 0.0
    assert agreement([0.2, 0.5, 0.8]) == pytest.approx(1.0 - (0.3 + 0.6 + 0.3) / 3)


def test_means_and_spread_are_by_criterion() -> None:
    opinions = [opinion([0.0, 0.5]), opinion([1.0, 0.5]), replace(opinion([0.5, 0.5]), model="other")]
    assert mean_scores(opinions) == {"n0": 0.5, "n1": 0.5}
    assert spread(opinions) == {"n0": 1.0, "n1": 0.0}
