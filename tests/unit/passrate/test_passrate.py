"""Pass rates against brute force and hand values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawhpc.passrate import BOOTSTRAP_SEED, NUM_RESAMPLES, Estimate, paired_difference, pass_at_k, tabulate
from clawhpc.records import CallRecord, FailedAttempt, Judgement, Outcome, RolloutRecord, Timings, Usage, Verdict
from tests.fakes.records import make_group
from tests.fakes.records import make_record as make_rollout
from tests.fakes.session import Session


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


def test_an_evaluation_without_any_verdict_estimates_nothing_and_says_how_all_ended() -> None:
    table = tabulate([make_record("a", 0, None)])
    assert (table.num_tasks, table.num_rollouts, table.num_failed) == (0, 0, 1)
    assert (table.mean_reward, table.pass_at_1, table.pass_at_k, table.per_rollout) == (None, None, {}, {})
    assert table.outcomes == {"verifier_failed": 1}
    assert tabulate([]).outcomes == {}


def call_of(input_tokens: int, output_tokens: int, cached_tokens: int = 0, engine_s: float = 0.0) -> CallRecord:
    session = Session()
    session.call((1,), reply=(2,))
    usage = Usage(input_tokens=input_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)
    return replace(session.calls[0], usage=usage, engine_s=engine_s)


def test_what_a_rollout_takes_is_summed_over_its_calls_and_averaged_over_tasks() -> None:
    calls = (call_of(10, 3, engine_s=0.5), call_of(20, 5, cached_tokens=10, engine_s=1.0))
    timings = Timings(started_at=0.0, boot_s=1.0, run_s=5.0, verify_s=2.0, harness_cpu_s=0.25)
    long = replace(make_record("a", 0, 1.0), calls=calls, timings=timings)
    table = tabulate([long, make_record("b", 0, 0.0)])
    means = {name: value.mean for name, value in table.per_rollout.items()}
    assert means == {
        "calls": 1.0,
        "prompt_tokens": 15.0,
        "cached_tokens": 5.0,
        "sampled_tokens": 4.0,
        "wall_s": 4.0,
        "engine_wait_s": 0.75,
        "harness_cpu_s": 0.125,
    }
    assert (table.per_rollout["calls"].low, table.per_rollout["calls"].high) == (0.0, 2.0)


def test_a_price_counts_every_call_that_was_made_and_without_one_there_is_no_cost() -> None:
    def price(usage: Usage) -> float:
        return usage.input_tokens + 10.0 * usage.output_tokens

    paid = [replace(make_record(task, 0, reward), calls=(call_of(2, 1),)) for task, reward in (("a", 1.0), ("b", None))]
    assert tabulate(paid, price).policy_usd == 24.0
    assert tabulate(paid, price).per_rollout["policy_usd"].mean == 12.0
    assert tabulate(paid).policy_usd is None
    assert "policy_usd" not in tabulate(paid).per_rollout


def test_a_cost_is_not_known_where_an_endpoint_does_not_count() -> None:
    counted, silent = call_of(2, 1), call_of(0, 0)
    records = [replace(make_record("a", 0, 1.0), calls=(counted, silent))]
    assert tabulate(records, lambda usage: 1.0).policy_usd is None
    failed = [replace(make_record("a", 0, 1.0), calls=(counted, replace(silent, failure="cancelled")))]
    assert tabulate(failed, lambda usage: float(usage.input_tokens)).policy_usd == 2.0


def judged(task_id: str, cost_usd: float | None) -> RolloutRecord:
    judgement = Judgement(
        opinions=(),
        score=0.5,
        agreement=None,
        spread={},
        prompt_digest="",
        num_requests=1,
        usage=Usage(input_tokens=1, output_tokens=1),
        cost_usd=cost_usd,
    )
    return replace(make_record(task_id, 0, 0.5), verdict=Verdict(reward=0.5, judgement=judgement))


def test_a_judge_costs_what_is_known_of_every_judgement_or_nothing_that_is_known() -> None:
    known = tabulate([judged("a", 3.0), judged("b", 1.0), make_record("c", 0, 1.0)])
    assert known.judge_usd == 4.0
    assert known.per_rollout["judge_usd"].mean == pytest.approx(4 / 3)
    for table in (tabulate([judged("a", 3.0), judged("b", None)]), tabulate([make_record("c", 0, 1.0)])):
        assert table.judge_usd is None
        assert "judge_usd" not in table.per_rollout


def test_a_rollout_passes_by_what_the_verifier_said_not_by_the_reward_that_trains() -> None:
    shaped = replace(make_record("a", 0, 0.7), verdict=Verdict(reward=0.7, unshaped=1.0))
    table = tabulate([shaped])
    assert table.mean_reward == table.pass_at_1 == Estimate(mean=1.0, low=1.0, high=1.0)


REWARDS = st.sampled_from([None, 0.0, 0.3, 1.0])
DRAWN = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["pi", "codex"]), REWARDS, st.floats(0, 9)), max_size=12
)


@settings(max_examples=30, deadline=None)
@given(drawn=DRAWN, data=st.data())
def test_the_order_of_the_records_says_nothing(
    drawn: list[tuple[str, str, float | None, float]], data: st.DataObject
) -> None:
    records = [
        replace(make_record(task, sample, reward, harness), timings=Timings(started_at=0.0, run_s=run_s))
        for sample, (task, harness, reward, run_s) in enumerate(drawn)
    ]
    shuffled = data.draw(st.permutations(records))
    assert tabulate(shuffled) == tabulate(records)


@settings(max_examples=30, deadline=None)
@given(rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8))
def test_an_interval_holds_its_mean_and_stays_within_what_was_seen(rewards: list[float]) -> None:
    reward = tabulate(make_record(str(task), 0, reward) for task, reward in enumerate(rewards)).mean_reward
    assert reward is not None
    assert min(rewards) - 1e-12 <= reward.low <= reward.high <= max(rewards) + 1e-12
    assert reward.mean == pytest.approx(sum(rewards) / len(rewards))


def test_an_interval_is_the_percentiles_of_the_means_over_tasks_drawn_with_replacement() -> None:
    rewards = [0.0, 0.1, 0.1, 0.4, 0.7, 1.0]
    picks = np.random.default_rng(BOOTSTRAP_SEED).integers(0, len(rewards), size=(NUM_RESAMPLES, len(rewards)))
    low, high = np.percentile(np.array(rewards)[picks].mean(axis=1), [2.5, 97.5])
    for _ in range(2):  # what is drawn is kept
        reward = tabulate(make_record(str(task), 0, reward) for task, reward in enumerate(rewards)).mean_reward
        assert reward is not None
        assert (reward.low, reward.high) == (pytest.approx(low), pytest.approx(high))


def test_the_interval_of_many_tasks_is_that_of_a_mean() -> None:
    passed = tabulate(make_record(str(task), 0, float(task % 3 == 0)) for task in range(2000)).pass_at_1
    assert passed is not None
    half = 1.96 * (1 / 3 * 2 / 3 / 2000) ** 0.5
    assert passed.high - passed.mean == pytest.approx(half, rel=0.05)
    assert passed.mean - passed.low == pytest.approx(half, rel=0.05)


def test_the_difference_of_rewards_is_paired_likewise() -> None:
    before = [make_record(str(task), 0, 0.25 * (task % 2)) for task in range(10)]
    after = [make_record(str(task), 0, 0.25 * (task % 2) + 0.5) for task in range(10)]
    difference = paired_difference(before, after, "reward")
    assert (difference.low, difference.mean, difference.high) == (0.5, 0.5, 0.5)
