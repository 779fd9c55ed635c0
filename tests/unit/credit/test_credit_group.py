"""Law 6 and the formulas of the GRPO family."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.credit.group import credit_groups, credit_roles
from clawhpc.credit.settings import CreditSettings
from clawhpc.records import CallRole, Outcome, RolloutRecord
from tests.fakes.records import make_group, make_record

DR_GRPO = CreditSettings(baseline="dr_grpo")


def make_rollouts(*rewards: float | None, task: str = "task", harness: str = "pi") -> list[RolloutRecord]:
    group = make_group(task, harness=harness)
    return [make_record(group, sample, reward) for sample, reward in enumerate(rewards)]


def test_grpo_centers_and_scales_inside_the_group() -> None:
    advantages = credit_groups(make_rollouts(0.0, 0.0, 1.0, 1.0)).advantages.values()
    std = math.sqrt(1 / 3)
    assert list(advantages) == pytest.approx([-0.5 / std, -0.5 / std, 0.5 / std, 0.5 / std], rel=1e-5)


@pytest.mark.parametrize("epsilon", [-1.0, math.nan, math.inf])
def test_an_epsilon_that_is_no_small_number_is_refused(epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"std_epsilon=.*: must be at least 0"):
        CreditSettings(std_epsilon=epsilon)


def test_dr_grpo_only_centers() -> None:
    advantages = credit_groups(make_rollouts(0.0, 0.25, 1.0, 0.75), DR_GRPO).advantages.values()
    assert list(advantages) == [-0.5, -0.25, 0.5, 0.25]


def test_groups_of_one_task_in_two_harnesses_do_not_share_a_baseline() -> None:
    rollouts = make_rollouts(0.0, 0.5) + make_rollouts(0.5, 1.0, harness="claude_code")
    credit = credit_groups(rollouts, DR_GRPO)
    assert list(credit.advantages.values()) == [-0.25, 0.25, -0.25, 0.25]
    assert credit.num_groups == 2


def test_an_infrastructure_failure_is_not_a_zero_and_the_baseline_is_recomputed() -> None:
    failed = make_rollouts(0.5, 1.0, None)
    credit = credit_groups(failed, DR_GRPO)
    assert list(credit.advantages.values()) == [-0.25, 0.25]
    assert failed[2].rollout_id not in credit.advantages
    assert credit.discarded_rollouts == {"verifier_failed": 1}
    assert credit.reward_mean == 0.75


def test_an_over_branched_rollout_keeps_its_reward_but_enters_nothing() -> None:
    group = make_group()
    rollouts = [make_record(group, 0, 0.0), make_record(group, 1, 1.0)]
    lost = make_record(group, 2, 1.0, outcome=Outcome.OVER_BRANCHED)
    credit = credit_groups([*rollouts, lost], DR_GRPO)
    assert list(credit.advantages.values()) == [-0.5, 0.5]
    assert credit.discarded_rollouts == {"over_branched": 1}


def test_a_timeout_is_the_policys_own_doing_and_trains() -> None:
    group = make_group()
    late = make_record(group, 1, 0.0, outcome=Outcome.TIMEOUT)
    assert len(credit_groups([make_record(group, 0, 1.0), late]).advantages) == 2


def test_groups_without_spread_or_with_one_rollout_are_skipped_and_counted() -> None:
    rollouts = [
        *make_rollouts(1.0, 1.0, 1.0, task="solved"),
        *make_rollouts(1.0, None, task="alone"),
        *make_rollouts(None, None, task="lost"),
        *make_rollouts(0.0, 1.0, task="good"),
    ]
    credit = credit_groups(rollouts)
    assert credit.skipped_groups == {"no_spread": 1, "too_few": 2}
    assert {name.split("--")[0] for name in credit.advantages} == {"train-000000-good"}


def test_rewards_that_differ_by_rounding_only_have_no_spread() -> None:
    credit = credit_groups(make_rollouts(0.3, 0.1 + 0.2))
    assert credit.skipped_groups == {"no_spread": 1}


def test_a_rollout_that_comes_twice_is_refused() -> None:
    (one, two) = make_rollouts(0.0, 1.0)
    with pytest.raises(ValueError, match="comes twice"):
        credit_groups([one, two, one])


def test_an_empty_step_gives_numbers_not_nan() -> None:
    credit = credit_groups([])
    assert credit.advantages == {}
    assert all(math.isfinite(value) for value in credit.log_values().values())


WITH_SUBAGENTS = CreditSettings(role_weights={"subagent": 0.5})
BOTH = frozenset({CallRole.MAIN, CallRole.SUBAGENT})


def test_subagents_are_measured_against_the_rollouts_that_used_them() -> None:
    group = make_rollouts(0.0, 1.0, 0.25, 0.75, None)
    drawn = {rollout.rollout_id: BOTH if sample >= 2 else {CallRole.MAIN} for sample, rollout in enumerate(group)}
    settings = CreditSettings(baseline="dr_grpo", role_weights={"subagent": 0.5})
    credit = credit_roles(group, settings, drawn)
    assert list(credit[CallRole.MAIN].advantages.values()) == [-0.5, 0.5, -0.25, 0.25]
    assert credit[CallRole.SUBAGENT].advantages == {group[2].rollout_id: -0.25, group[3].rollout_id: 0.25}


def test_roles_of_one_task_in_two_harnesses_do_not_share_a_baseline() -> None:
    rollouts = make_rollouts(0.0, 1.0) + make_rollouts(0.5, 1.0, harness="claude_code")
    drawn = {rollout.rollout_id: BOTH for rollout in rollouts}
    settings = CreditSettings(baseline="dr_grpo", role_weights={"subagent": 1.0})
    credit = credit_roles(rollouts, settings, drawn)[CallRole.SUBAGENT]
    assert list(credit.advantages.values()) == [-0.5, 0.5, -0.25, 0.25]


def test_a_role_that_one_rollout_used_is_skipped_and_counted_under_its_own_name() -> None:
    group = make_rollouts(0.0, 1.0)
    credit = credit_roles(group, WITH_SUBAGENTS, {group[0].rollout_id: BOTH})
    assert credit[CallRole.SUBAGENT].advantages == {}
    values = credit[CallRole.SUBAGENT].log_values(CallRole.SUBAGENT)
    assert values["credit_subagent/skipped_too_few"] == 1
    assert not values.keys() & credit[CallRole.MAIN].log_values().keys()


def test_only_roles_that_train_have_credit() -> None:
    group = make_rollouts(0.0, 1.0)
    drawn = {rollout.rollout_id: frozenset(CallRole) for rollout in group}
    assert list(credit_roles(group, CreditSettings(), drawn)) == [CallRole.MAIN]
    assert list(credit_roles(group, WITH_SUBAGENTS, drawn)) == [CallRole.MAIN, CallRole.SUBAGENT]


rewards = st.lists(st.none() | st.floats(0, 1), max_size=6)


@given(st.lists(rewards, max_size=4), st.sampled_from(["grpo", "dr_grpo"]))
def test_credit_is_finite_sums_to_zero_in_each_group_and_follows_the_rewards(
    groups: list[list[float | None]], baseline: str
) -> None:
    rollouts = [
        record for number, values in enumerate(groups) for record in make_rollouts(*values, task=f"task{number}")
    ]
    credit = credit_groups(rollouts, CreditSettings(baseline=baseline))  # type: ignore[arg-type]
    assert all(math.isfinite(value) for value in [*credit.advantages.values(), *credit.log_values().values()])
    credited = [record for record in rollouts if record.rollout_id in credit.advantages]
    for key in {record.key for record in credited}:
        members = [record for record in credited if record.key == key]
        values = [credit.advantages[record.rollout_id] for record in members]
        assert len(members) >= 2
        assert sum(values) == pytest.approx(0.0, abs=1e-6)
        assert max(values) > 0 > min(values)
        by_reward = sorted(zip([record.verdict.reward for record in members if record.verdict], values, strict=True))
        assert [value for _, value in by_reward] == sorted(values)
    assert credit.num_groups == len([values for values in groups if values])
    assert len(credited) + sum(credit.discarded_rollouts.values()) <= len(rollouts)


@given(
    st.lists(st.tuples(st.none() | st.floats(0, 1), st.sets(st.sampled_from(CallRole))), max_size=6),
    st.sampled_from(["grpo", "dr_grpo"]),
)
def test_the_main_paths_credit_is_bit_for_bit_the_same_whatever_other_roles_train(
    members: list[tuple[float | None, set[CallRole]]], baseline: str
) -> None:
    rollouts = make_rollouts(*(reward for reward, _ in members))
    drawn = {rollout.rollout_id: roles for rollout, (_, roles) in zip(rollouts, members, strict=True)}
    weights = {"subagent": 0.5, "compaction": 2.0, "side": 1.0}
    alone = credit_groups(rollouts, CreditSettings(baseline=baseline))  # type: ignore[arg-type]
    every = credit_roles(rollouts, CreditSettings(baseline=baseline, role_weights=weights), drawn)  # type: ignore[arg-type]
    assert every[CallRole.MAIN] == alone
    for role, credit in every.items():
        if role is not CallRole.MAIN:
            assert all(role in drawn[rollout_id] for rollout_id in credit.advantages)
