"""Credit of a step from a critic's values: GAE rollout by rollout, whitening role by role, and what is logged of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.credit.gae import Floats, path_gae, tree_gae
from clawhpc.credit.settings import CreditSettings
from clawhpc.credit.values import RewardedTurns, ValueCredit, credit_values, explained_variance, whiten
from clawhpc.records import CallRole
from clawhpc.tree.conversation import Turn, conversation_turns
from clawhpc.tree.prune import prune_tree
from tests.fakes.session import Session
from tests.fakes.session_strategies import sessions, some_ids

RAW = CreditSettings(estimator="tree_gae", whiten=False, gamma=0.9, gae_lambda=0.8)
WHITE = CreditSettings(estimator="tree_gae", gamma=0.9, gae_lambda=0.8, std_epsilon=0.0)


def turn(call_id: int, start: int, stop: int, parent: int | None = None, role: CallRole = CallRole.MAIN) -> Turn:
    return Turn(call_id=call_id, role=role, parent=parent, start=start, stop=stop)


def credit_of(rollouts: Sequence[RewardedTurns], values_M: Floats, how: CreditSettings) -> ValueCredit:
    """Where all tokens train."""
    return credit_values(rollouts, values_M, np.ones(len(values_M), dtype=bool), how)


FORKED = RewardedTurns(
    turns=(turn(0, 0, 2), turn(1, 2, 4, parent=0), turn(2, 4, 5, parent=0), turn(3, 5, 6, parent=2), turn(4, 6, 7, 2)),
    reward=1.0,
)
CHAIN = RewardedTurns(turns=(turn(0, 0, 1), turn(1, 1, 3, parent=0)), reward=0.25)
EMPTY = RewardedTurns(turns=(), reward=0.5)
VALUES = np.linspace(0.0, 1.0, FORKED.num_tokens + CHAIN.num_tokens)


@pytest.mark.parametrize(("name", "estimator"), [("path_gae", path_gae), ("tree_gae", tree_gae)])
def test_each_rollout_is_estimated_by_itself_in_the_order_of_the_step(name: str, estimator: object) -> None:
    raw = CreditSettings(estimator=name, whiten=False, gamma=0.9, gae_lambda=0.8)  # type: ignore[arg-type]
    credit = credit_of([FORKED, EMPTY, CHAIN], VALUES, raw)
    cut = FORKED.num_tokens
    one = estimator(FORKED.turns, VALUES[:cut], 1.0, gamma=0.9, gae_lambda=0.8)  # type: ignore[operator]
    other = estimator(CHAIN.turns, VALUES[cut:], 0.25, gamma=0.9, gae_lambda=0.8)  # type: ignore[operator]
    assert credit.advantages.tolist() == [*one.advantages_M, *other.advantages_M]
    assert credit.returns.tolist() == [*one.returns_M, *other.returns_M]


def test_whitening_leaves_returns_and_what_is_logged_as_they_were() -> None:
    raw, white = (credit_of([FORKED, CHAIN], VALUES, how) for how in (RAW, WHITE))
    assert white.returns.tolist() == raw.returns.tolist()
    assert white.metrics == raw.metrics
    assert white.advantages.mean() == pytest.approx(0.0, abs=1e-12)
    assert white.advantages.std() == pytest.approx(1.0)
    assert (np.argsort(white.advantages) == np.argsort(raw.advantages)).all()


def test_each_role_is_whitened_by_itself_so_that_mains_credit_does_not_depend_on_what_else_trains() -> None:
    sub = (turn(5, 7, 8, role=CallRole.SUBAGENT), turn(6, 8, 10, parent=5, role=CallRole.SUBAGENT))
    beside = RewardedTurns(turns=(*FORKED.turns, *sub), reward=1.0)
    values = np.concatenate([VALUES[:7], [5.0, -5.0, 7.0]])
    alone = credit_of([FORKED], values[:7], WHITE).advantages
    both = credit_of([beside], values, WHITE).advantages
    assert both[:7].tolist() == alone.tolist()
    assert both[7:].mean() == pytest.approx(0.0, abs=1e-12)
    assert both[7:].std() == pytest.approx(1.0)


def test_tokens_of_a_role_are_found_where_they_stand_in_the_step() -> None:
    """The subagent drew the first token of its rollout, and the main loop the others."""
    mixed = RewardedTurns(turns=(turn(0, 1, 3), turn(1, 0, 1, role=CallRole.SUBAGENT)), reward=1.0)
    credit = credit_of([CHAIN, mixed], np.zeros(6), WHITE)
    assert credit.advantages[3] == 0.0, "one token by itself is only centred"
    assert credit.advantages[[0, 1, 2, 4, 5]].std() == pytest.approx(1.0)
    assert credit.metrics["credit/flat_roles"] == 1


def test_tokens_that_do_not_train_hand_credit_on_but_are_in_no_statistic() -> None:
    trains = np.arange(len(VALUES)) % 3 > 0
    everyone = credit_of([FORKED, CHAIN], VALUES, RAW)
    raw, white = (credit_values([FORKED, CHAIN], VALUES, trains, how) for how in (RAW, WHITE))
    assert raw.advantages.tolist() == everyone.advantages.tolist()
    assert raw.returns.tolist() == white.returns.tolist() == everyone.returns.tolist()
    assert white.advantages[trains] == pytest.approx(whiten(raw.advantages[trains], 0.0))
    assert not white.advantages[~trains].any()
    assert raw.metrics["credit/advantage_mean"] == pytest.approx(raw.advantages[trains].mean())
    assert raw.metrics["credit/return_std"] == pytest.approx(raw.returns[trains].std())
    assert raw.metrics["credit/value_mean"] == pytest.approx(VALUES[trains].mean())
    explained = explained_variance(raw.returns[trains], VALUES[trains])
    assert raw.metrics["credit/explained_variance"] == pytest.approx(explained)
    nothing = credit_values([FORKED, CHAIN], VALUES, np.zeros_like(trains), WHITE)
    assert not any(nothing.metrics.values())


def test_advantages_without_spread_are_only_centred_and_counted() -> None:
    rollout = RewardedTurns(turns=(turn(0, 0, 3),), reward=0.3)
    credit = credit_of([rollout], np.array([0.1, 0.1, 0.1]), CreditSettings(estimator="path_gae"))
    assert credit.advantages == pytest.approx([0.0] * 3)
    assert np.abs(credit.advantages).max() < 1e-12, "rounding is not made a signal"
    assert credit.metrics["credit/flat_roles"] == 1
    assert credit.metrics["credit/advantage_mean"] == pytest.approx(0.2)


def test_a_step_without_tokens_gives_numbers_not_nan() -> None:
    for rollouts in ([], [EMPTY]):
        credit = credit_of(rollouts, np.zeros(0), WHITE)
        assert credit.advantages.shape == credit.returns.shape == (0,)
        assert all(math.isfinite(value) for value in credit.metrics.values())


def test_values_that_do_not_fit_the_step_are_refused() -> None:
    with pytest.raises(AssertionError, match="one value for each token"):
        credit_of([CHAIN], np.zeros(4), RAW)


def test_explained_variance_is_one_for_the_returns_themselves_and_zero_for_a_constant() -> None:
    returns = np.array([0.0, 0.5, 1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, returns + 3.0) == pytest.approx(1.0), "an offset is no variance"
    assert explained_variance(returns, np.full(3, 0.7)) == pytest.approx(0.0)
    assert explained_variance(returns, -returns) == pytest.approx(-3.0)
    assert explained_variance(np.ones(3), returns) == 0.0


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20))
def test_whitening_keeps_the_order_and_never_makes_numbers_that_are_not_finite(advantages: list[float]) -> None:
    before = np.array(advantages)
    after = whiten(before, std_epsilon=0.0)
    assert np.isfinite(after).all()
    assert after.mean() == pytest.approx(0.0, abs=1e-6)
    assert after.std() == pytest.approx(1.0, abs=1e-6) or after.std() < 1e-6
    order = np.argsort(before, kind="stable")
    assert (np.diff(after[order]) >= 0).all()


def credit_of_main(session: Session, credit: CreditSettings) -> dict[int, list[float]]:
    """call_id -> the advantages of its tokens, where a token's value depends on its call alone."""
    tree = prune_tree("r", session.calls, max_live_leaves=99, trained_roles=credit.trained_roles).tree
    turns = conversation_turns(tree)
    values_M = np.zeros(tree.num_sampled_tokens)
    for at in turns:
        values_M[at.start : at.stop] = np.linspace(0.1, 0.7, at.stop - at.start) / (1 + at.call_id)
    advantages = credit_of([RewardedTurns(turns=turns, reward=1.0)], values_M, credit).advantages
    return {at.call_id: advantages[at.start : at.stop].tolist() for at in turns if at.role is CallRole.MAIN}


@settings(max_examples=60, deadline=None)
@given(sessions(replies=some_ids), st.sampled_from(["path_gae", "tree_gae"]))
def test_the_main_paths_credit_does_not_change_when_other_roles_train_too(session: Session, name: str) -> None:
    weights = {"subagent": 0.5, "compaction": 2.0, "side": 1.0}
    alone = CreditSettings(estimator=name, gae_lambda=0.9)  # type: ignore[arg-type]
    beside = CreditSettings(estimator=name, gae_lambda=0.9, role_weights=weights)  # type: ignore[arg-type]
    of_main = credit_of_main(session, alone)
    assert credit_of_main(session, beside).keys() == of_main.keys()
    for call_id, advantages in credit_of_main(session, beside).items():
        assert advantages == pytest.approx(of_main[call_id], abs=1e-9)


def test_a_compaction_carries_the_reward_of_its_rollout() -> None:
    session = Session()
    one = session.call((1, 2), reply=(5, 6))
    session.call((1, 2), one, (3,), reply=(7,), role=CallRole.COMPACTION)
    tree = prune_tree("r", session.calls, max_live_leaves=1, trained_roles=frozenset(CallRole)).tree
    rollout = RewardedTurns(turns=conversation_turns(tree), reward=1.0)
    credit = credit_of([rollout], np.array([0.5, 0.5, 0.25]), RAW)
    assert credit.advantages[1:].tolist() == [0.5, 0.75]
