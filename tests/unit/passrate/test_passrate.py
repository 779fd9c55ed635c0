"""Pass rates against brute force and hand values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.passrate import paired_difference, pass_at_k, tabulate
from clawhpc.records import FailedAttempt, Outcome, RolloutRecord
from tests.fakes.records import make_group
from tests.fakes.records import make_record as make_rollout


def make_record(task_id: str, sample: int, reward: float | None, harness: str = "pi") -> RolloutRecord:
    return make_rollout(make_group(task_id, phase="eval", harness=harness, num_samples=sample + 1), sample, reward)


@given(passed=st.lists(st.booleans(), min_size=1, max_size=7), k=st.integers(1, 7))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(passed: list[bool], k: int) -> None:
    if k > len(passed):
        with pytest.raises(ValueError, match="needs at least"):
            pass_at_k(len(passed), sum(passed), k)
        return
    subsets = list(combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_a_failed_rollout_counts_neither_way() -> None:
    records = [make_record("a", 0, 1.0), make_record("a", 1, 0.0), make_record("a", 2, None)]
    table = tabulate(records)
    assert (table.num_rollouts, table.num_failed, table.num_retried) == (2, 1, 0)
    assert table.pass_at_1.mean == 0.5
    assert set(table.pass_at_k) == {2}


def test_a_rollout_that_the_machine_failed_at_first_counts_like_any_other_and_is_named() -> None:
    attempt = FailedAttempt(outcome=Outcome.ENGINE_FAILED, detail="it died", seconds=1.0)
    records = [make_record("a", 0, 1.0), replace(make_record("a", 1, 0.0), failed_attempts=(attempt,))]
    assert (tabulate(records).num_rollouts, tabulate(records).num_retried) == (2, 1)


def test_partial_credit_is_reward_but_no_pass() -> None:
    table = tabulate([make_record("a", 0, 0.5), make_record("b", 0, 1.0)])
    assert table.mean_reward.mean == 0.75
    assert table.pass_at_1.mean == 0.5


def test_the_interval_is_over_tasks_not_rollouts() -> None:
    same = [make_record("a", sample, float(sample % 2)) for sample in range(100)]
    assert tabulate(same).pass_at_1.low == tabulate(same).pass_at_1.high == 0.5
    spread = [make_record(str(task), sample, float(task % 2)) for task in range(10) for sample in range(10)]
    assert tabulate(spread).pass_at_1.low < 0.3 < 0.7 < tabulate(spread).pass_at_1.high


def under_two_harnesses(reward_of_task: Callable[[int], float]) -> list[RolloutRecord]:
    return [
        make_record(str(task), 0, reward_of_task(task), name) for task in range(10) for name in ("pi", "claude_code")
    ]


def test_a_task_under_two_harnesses_is_one_task() -> None:
    one, two = (
        [make_record(str(task), 0, float(task % 2)) for task in range(10)],
        under_two_harnesses(lambda t: t % 2),
    )
    assert (tabulate(two).num_tasks, tabulate(two).num_rollouts) == (10, 20)
    assert tabulate(two).pass_at_1 == tabulate(one).pass_at_1
    failed = [make_record(str(task), 0, 0.0) for task in range(10)]
    assert paired_difference(under_two_harnesses(lambda _: 0.0), two) == paired_difference(failed, one)


def test_harnesses_of_one_task_weigh_the_same_whatever_their_rollouts() -> None:
    many = [make_record("a", sample, 1.0) for sample in range(9)]
    assert tabulate([*many, make_record("a", 0, 0.0, "claude_code")]).pass_at_1.mean == 0.5


def test_a_task_is_paired_with_itself_under_the_same_harness_only() -> None:
    before, after = [make_record("a", 0, 0.0)], [make_record("a", 0, 1.0, "claude_code")]
    with pytest.raises(ValueError, match="same harness in both evaluations: 1 have one before, 1 after"):
        paired_difference(before, after)


def test_the_difference_is_paired_by_task() -> None:
    before = [make_record(str(task), 0, float(task % 2)) for task in range(10)]
    after = [make_record(str(task), 0, 1.0) for task in range(5, 15)]
    assert paired_difference(before, after).mean == pytest.approx(2 / 5)
    with pytest.raises(ValueError, match="no task has a verdict"):
        paired_difference(before, [make_record("other", 0, 1.0)])


def test_an_evaluation_without_any_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match="none of 1 rollouts"):
        tabulate([make_record("a", 0, None)])
