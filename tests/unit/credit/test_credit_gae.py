"""GAE along conversations, against a reference written from the definition: every path by itself, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.credit.gae import Estimate, path_gae, tree_gae
from clawhpc.records import CallRole
from clawhpc.tree.conversation import Turn, conversation_paths, conversation_turns
from clawhpc.tree.prune import prune_tree
from tests.fakes.session import Ids, Session

ESTIMATORS = pytest.mark.parametrize("estimator", [path_gae, tree_gae])

laws = settings(max_examples=150, deadline=None)


def make_turns(*parents_and_lengths: tuple[int | None, int]) -> tuple[Turn, ...]:
    """Turns with (parent, number of tokens) each, in the order of their tokens."""
    stops = np.cumsum([length for _, length in parents_and_lengths]).tolist()
    return tuple(
        Turn(call_id=index, role=CallRole.MAIN, parent=parent, start=stop - length, stop=stop)
        for index, ((parent, length), stop) in enumerate(zip(parents_and_lengths, stops, strict=True))
    )


def tokens_of(turns: Sequence[Turn], path: Sequence[int]) -> list[int]:
    return [token for at in path for token in range(turns[at].start, turns[at].stop)]


def advantage_by_definition(values: Sequence[float], reward: float, at: int, gamma: float, lam: float) -> float:
    """The sum over l of (gamma lambda)^l delta_{t+l}, on one path."""
    end = len(values)
    rewards = [0.0] * (end - 1) + [reward]
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < end else 0.0) - values[t] for t in range(end)]
    return sum((gamma * lam) ** ahead * deltas[at + ahead] for ahead in range(end - at))


def chance_of_path(turns: Sequence[Turn], path: Sequence[int], after: int) -> float:
    """Of a walk that has come to turn `after` and takes each continuation with the same chance."""
    chance = 1.0
    for at in path[path.index(after) :][:-1]:
        chance /= sum(turn.parent == at for turn in turns)
    return chance


def by_definition(
    turns: Sequence[Turn], values: Sequence[float], reward: float, gamma: float, lam: float, *, on_tree: bool
) -> list[float]:
    """Each token's advantage: over the paths through it, the mean (`path_gae`) or the expectation (`tree_gae`)."""
    advantages = [0.0] * len(values)
    weights = [0.0] * len(values)
    for path in conversation_paths(turns):
        tokens = tokens_of(turns, path)
        on_path = [values[token] for token in tokens]
        turn_of = {token: at for at in path for token in tokens_of(turns, [at])}
        for position, token in enumerate(tokens):
            weight = chance_of_path(turns, path, turn_of[token]) if on_tree else 1.0
            advantages[token] += weight * advantage_by_definition(on_path, reward, position, gamma, lam)
            weights[token] += weight
    return [advantage / weight for advantage, weight in zip(advantages, weights, strict=True)]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[tuple[Turn, ...], list[float]]:
    """Turns with forks, several beginnings, empty replies; and a value for each token."""
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    turns = make_turns(
        *((draw(st.none() | st.integers(0, at - 1)) if at else None, size) for at, size in enumerate(sizes))
    )
    return turns, draw(st.lists(st.floats(-2, 2), min_size=sum(sizes), max_size=sum(sizes)))


fractions = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@laws
@given(conversations(), st.floats(0, 1), fractions, fractions)
def test_path_gae_is_the_mean_of_gae_on_each_path_by_itself(
    conversation: tuple[tuple[Turn, ...], list[float]], reward: float, gamma: float, lam: float
) -> None:
    turns, values = conversation
    advantages, returns = path_gae(turns, values, reward, gamma=gamma, gae_lambda=lam)
    expected = by_definition(turns, values, reward, gamma, lam, on_tree=False)
    assert advantages == pytest.approx(expected, abs=1e-12)
    assert returns == pytest.approx(np.add(expected, values), abs=1e-12)


@laws
@given(conversations(), st.floats(0, 1), fractions, fractions)
def test_tree_gae_is_the_expectation_over_walks_that_take_each_continuation_with_the_same_chance(
    conversation: tuple[tuple[Turn, ...], list[float]], reward: float, gamma: float, lam: float
) -> None:
    turns, values = conversation
    advantages, returns = tree_gae(turns, values, reward, gamma=gamma, gae_lambda=lam)
    expected = by_definition(turns, values, reward, gamma, lam, on_tree=True)
    assert advantages == pytest.approx(expected, abs=1e-12)
    assert returns == pytest.approx(np.add(expected, values), abs=1e-12)


@laws
@given(conversations(), st.floats(0, 1))
@ESTIMATORS
def test_without_discount_and_with_lambda_one_advantage_is_reward_minus_value(
    estimator: Callable[..., Estimate], conversation: tuple[tuple[Turn, ...], list[float]], reward: float
) -> None:
    turns, values = conversation
    advantages, returns = estimator(turns, values, reward, gamma=1.0, gae_lambda=1.0)
    assert advantages == pytest.approx([reward - value for value in values], abs=1e-12)
    assert returns == pytest.approx([reward] * len(values), abs=1e-12)


@laws
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 2**32 - 1), fractions, fractions)
def test_both_agree_bit_for_bit_on_a_chain(sizes: list[int], seed: int, gamma: float, lam: float) -> None:
    turns = make_turns(*((at - 1 if at else None, size) for at, size in enumerate(sizes)))
    values = np.random.default_rng(seed).normal(size=sum(sizes))
    on_paths = path_gae(turns, values, 0.5, gamma=gamma, gae_lambda=lam)
    on_tree = tree_gae(turns, values, 0.5, gamma=gamma, gae_lambda=lam)
    assert (on_paths.advantages_M == on_tree.advantages_M).all()
    assert (on_paths.returns_M == on_tree.returns_M).all()


def test_two_tokens_by_hand() -> None:
    turns = make_turns((None, 2))
    advantages, returns = tree_gae(turns, [0.5, 0.25], 1.0, gamma=0.5, gae_lambda=0.5)
    last = 1.0 - 0.25
    assert advantages.tolist() == [0.5 * 0.25 - 0.5 + 0.25 * last, last]
    assert returns.tolist() == [advantages[0] + 0.5, 1.0]


LOPSIDED = make_turns((None, 1), (0, 1), (0, 1), (2, 1), (2, 1))
"""A trunk that forks in two, of which the second forks again: three paths, two continuations."""


def test_where_branches_are_lopsided_paths_count_alike_on_one_and_branches_on_the_other() -> None:
    values = [0.0, 0.9, 0.3, 0.0, 0.0]
    by_path = path_gae(LOPSIDED, values, 0.0, gamma=1.0, gae_lambda=0.0)
    by_branch = tree_gae(LOPSIDED, values, 0.0, gamma=1.0, gae_lambda=0.0)
    assert by_path.advantages_M[0] == pytest.approx((0.9 + 0.3 + 0.3) / 3)
    assert by_branch.advantages_M[0] == pytest.approx((0.9 + 0.3) / 2)


@ESTIMATORS
def test_credit_crosses_branches_at_their_trunk_and_nowhere_else(estimator: Callable[..., Estimate]) -> None:
    """What one branch is worth changes the credit of the trunk, against which the other branch is then measured."""
    before = estimator(LOPSIDED, [0.5, 0.5, 0.5, 0.5, 0.5], 1.0, gamma=1.0, gae_lambda=0.5).advantages_M
    after = estimator(LOPSIDED, [0.5, 0.9, 0.5, 0.5, 0.5], 1.0, gamma=1.0, gae_lambda=0.5).advantages_M
    assert (before != after).tolist() == [True, True, False, False, False]


@ESTIMATORS
def test_where_a_harness_forks_at_every_turn_the_first_turns_credit_depends_on_the_last_turns_value(
    estimator: Callable[..., Estimate],
) -> None:
    session = Session()
    history: tuple[Ids | int, ...] = ((1, 2, 3),)
    for turn in range(6):
        history = (*history, session.call(*history, (90, 91), reply=(5, turn)), (20, 21))
    tree = prune_tree("r", session.calls, max_live_leaves=6).tree
    turns = conversation_turns(tree)
    assert len(tree.leaves) == 6
    values = np.full(tree.num_sampled_tokens, 0.5)
    before = estimator(turns, values, 1.0, gamma=1.0, gae_lambda=0.95).advantages_M[turns[0].start]
    values[turns[-1].start] += 0.1
    after = estimator(turns, values, 1.0, gamma=1.0, gae_lambda=0.95).advantages_M[turns[0].start]
    ahead = turns[-1].start - turns[0].start
    assert after - before == pytest.approx(0.1 * (0.95 ** (ahead - 1) - 0.95**ahead))


@ESTIMATORS
def test_a_conversation_may_be_longer_than_the_stack_is_deep(estimator: Callable[..., Estimate]) -> None:
    turns = make_turns(*((at - 1 if at else None, 1) for at in range(5000)))
    advantages = estimator(turns, np.zeros(5000), 1.0, gamma=0.99, gae_lambda=1.0).advantages_M
    assert advantages[0] == pytest.approx(0.99**4999)


@ESTIMATORS
def test_an_empty_reply_passes_on_what_comes_after_it(estimator: Callable[..., Estimate]) -> None:
    with_gap = make_turns((None, 2), (0, 0), (1, 1))
    without = make_turns((None, 2), (0, 1))
    values = [0.2, 0.4, 0.6]
    found, expected = (estimator(turns, values, 1.0, gamma=0.9, gae_lambda=0.8) for turns in (with_gap, without))
    assert found.advantages_M.tolist() == expected.advantages_M.tolist()


@ESTIMATORS
def test_an_empty_last_reply_pays_the_reward_where_the_turn_before_it_ends(estimator: Callable[..., Estimate]) -> None:
    advantages, returns = estimator(make_turns((None, 1), (0, 0)), [0.25], 1.0, gamma=0.9, gae_lambda=0.8)
    assert advantages.tolist() == [0.75]
    assert returns.tolist() == [1.0]


@ESTIMATORS
def test_a_rollout_without_tokens_has_no_credit(estimator: Callable[..., Estimate]) -> None:
    for turns in ((), make_turns((None, 0))):
        assert estimator(turns, [], 1.0, gamma=1.0, gae_lambda=1.0).advantages_M.shape == (0,)


@ESTIMATORS
def test_values_in_single_precision_are_credited_in_double(estimator: Callable[..., Estimate]) -> None:
    values = np.array([0.1, 0.2], dtype=np.float32)
    assert estimator(make_turns((None, 2)), values, 1.0, gamma=1.0, gae_lambda=0.9).advantages_M.dtype == np.float64


@ESTIMATORS
def test_a_value_too_many_or_too_few_is_refused(estimator: Callable[..., Estimate]) -> None:
    for values in ([0.1], [0.1, 0.2, 0.3]):
        with pytest.raises(AssertionError, match="one value for each token"):
            estimator(make_turns((None, 2)), values, 1.0, gamma=1.0, gae_lambda=1.0)
