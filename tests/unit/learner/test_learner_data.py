from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import UserError
from clawhpc.learner.data import StepBatch, _prune, build_rl_step, build_sft_step, sequence_tree
from clawhpc.learner.settings import LearnerSettings, Normaliser
from clawhpc.records import CallRole, Outcome, RolloutRecord
from tests.fakes.learner_trees import context, draw, plant
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Session

SETTINGS = LearnerSettings()
STEP = 5


def rollout(task: str, sample: int, reward: float | None, *, num_calls: int = 2, version: int = STEP) -> RolloutRecord:
    """Each call draws two tokens; the first prompt has four, each later one three more of its own."""
    session = Session()
    history: tuple[tuple[int, ...] | int, ...] = ((1, 2, 3, 4),)
    for at in range(num_calls):
        history += (session.call(*history, reply=(7, sample), version=version), (5, 6, at))
    return make_record(make_group(task, step=STEP), sample, reward, calls=tuple(session.calls))


def step(records: Sequence[RolloutRecord], settings: LearnerSettings = SETTINGS) -> StepBatch:
    return build_rl_step(STEP, records, settings, CreditSettings())


def weights_by_rollout(batch: StepBatch) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in batch.rows:
        at = row.sampled_BT
        for rollout_index, weight in zip(row.rollout_BT[at].tolist(), row.token_weight_BT[at].tolist(), strict=True):
            found.setdefault(rollout_index, []).append(weight)
    return found


def test_rollouts_without_credit_are_not_computed_but_count_in_the_denominator() -> None:
    batch = step([rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("b", 0, 1.0), rollout("b", 1, 1.0)])
    assert weights_by_rollout(batch) == {0: [pytest.approx(1 / 16)] * 4, 1: [pytest.approx(1 / 16)] * 4}
    assert batch.metrics["train/no_credit_share"] == 0.5
    assert batch.metrics["credit/skipped_no_spread"] == 1


def test_every_rollout_weighs_the_same_per_rollout_whatever_its_calls() -> None:
    records = [rollout("a", 0, 1.0, num_calls=1), rollout("a", 1, 0.0, num_calls=4)]
    weights = weights_by_rollout(step(records, replace(SETTINGS, normaliser="rollout")))
    assert [sum(weights[index]) for index in (0, 1)] == [pytest.approx(0.5)] * 2


def test_a_failure_of_the_machine_has_no_part_in_anything() -> None:
    sound = [rollout("a", 0, 1.0), rollout("a", 1, 0.0)]
    failed = replace(rollout("a", 2, None), outcome=Outcome.ENGINE_FAILED)
    with_failure, without = step([*sound, failed]), step(sound)
    assert weights_by_rollout(with_failure) == weights_by_rollout(without)
    assert with_failure.metrics["credit/discarded_rollouts"] == 1


def test_a_record_that_is_text_only_is_refused_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bad = rollout("a", 2, 1.0)
    bad = replace(bad, calls=tuple(replace(call, tokens=None) for call in bad.calls))
    with caplog.at_level(logging.WARNING):
        batch = step([rollout("a", 0, 1.0), rollout("a", 1, 0.0), bad])
    assert batch.metrics["tree/refused_rollouts"] == 1
    assert batch.metrics["train/reward"] == 0.5
    assert bad.rollout_id in caplog.text
    assert "text-only" in caplog.text


def test_a_tree_over_the_budget_is_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    records = [rollout("a", 0, 1.0), rollout("a", 1, 0.0, num_calls=9)]
    with caplog.at_level(logging.WARNING):
        batch = step(records, replace(SETTINGS, token_budget=20))
    assert batch.metrics["tree/over_budget"] == 1
    assert records[1].rollout_id in caplog.text
    assert set(weights_by_rollout(batch)) == {0}


@pytest.mark.parametrize("normaliser", ["token", "rollout", "constant"])
def test_a_tree_over_the_budget_takes_no_share_of_the_loss(normaliser: Normaliser) -> None:
    settings = replace(SETTINGS, token_budget=20, normaliser=normaliser)
    small = [rollout("a", 0, 1.0), rollout("a", 1, 0.0)]
    weights = weights_by_rollout(step([*small, rollout("a", 2, 0.0, num_calls=9)], settings))
    assert weights == weights_by_rollout(step(small, settings))


def test_a_budget_that_no_tree_of_a_step_fits_into_is_the_users_to_mend() -> None:
    settings = replace(SETTINGS, token_budget=10)
    small = rollout("a", 0, 1.0)
    message = r"learner\.token_budget=10: .*the smallest has 11 tokens"
    with pytest.raises(UserError, match=message):
        step([small, rollout("a", 1, 0.0, num_calls=9)], settings)
    assert step([small, rollout("a", 1, 1.0)], settings).rows == ()  # without spread it would teach nothing anyway
    with pytest.raises(UserError, match=message):
        build_sft_step(0, [_prune(small).tree], settings)
    with pytest.raises(UserError, match=message):
        step([small, rollout("a", 1, 0.0, num_calls=9), rollout("b", 0, 1.0, num_calls=1)], settings)


def test_a_rollout_that_drew_nothing_is_counted_and_stays_in_the_baseline() -> None:
    silent = replace(rollout("a", 1, 0.0), calls=())
    batch = step([rollout("a", 0, 1.0), silent])
    assert batch.metrics["tree/without_draws"] == 1
    assert batch.metrics["train/reward"] == 0.5
    assert set(weights_by_rollout(batch)) == {0}


def test_calls_of_other_roles_do_not_train() -> None:
    session = Session()
    session.call((1, 2, 3), reply=(7, 8))
    session.call((4, 4), reply=(9,), role=CallRole.SIDE)
    titled = make_record(make_group("a", step=STEP), 0, 1.0, calls=tuple(session.calls))
    batch = step([titled, rollout("a", 1, 0.0)])
    assert len(weights_by_rollout(batch)[0]) == 2
    assert batch.metrics["tree/dropped_role"] == 1


def test_the_age_of_the_oldest_draw_is_logged() -> None:
    batch = step([rollout("a", 0, 1.0, version=STEP - 2), rollout("a", 1, 0.0)])
    assert batch.metrics["train/staleness_max"] == 2


def test_log_probs_are_of_the_temperature_that_the_rollouts_were_drawn_at() -> None:
    records = [replace(rollout("a", sample, float(sample)), temperature=0.7) for sample in range(2)]
    assert [row.temperature for row in step(records).rows] == [0.7]
    with pytest.raises(ValueError, match=r"different temperatures: \[0\.7, 1\.0\]"):
        step([records[0], rollout("a", 1, 1.0)])


def test_how_faithfully_histories_repeat_draws_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    moved, reencoded = Session(), Session()
    first = moved.call((1, 2, 3, 4), reply=(7, 8))
    moved.call((1, 2, 9), first, (5, 6), reply=(7,))
    heard = reencoded.call((1, 2, 3, 4), reply=(7, 8))
    reencoded.call((1, 2, 3, 4, 70, 80, 5), reply=(7,), continues=heard, reencoded=1)
    records = [
        make_record(make_group("a", step=STEP), sample, float(sample), calls=tuple(session.calls))
        for sample, session in enumerate((moved, reencoded))
    ]
    with caplog.at_level(logging.WARNING):
        metrics = step(records).metrics
    assert [value for name, value in metrics.items() if name.startswith("drift/")] == [1, 1, 1, 1]
    assert records[1].rollout_id in caplog.text
    assert records[0].rollout_id not in caplog.text


def test_what_sharing_saves_is_logged() -> None:
    metrics = step([rollout("a", 0, 1.0), rollout("a", 1, 0.0)]).metrics
    assert metrics["tree/path_tokens"] == 2 * (4 + 2 + 3 + 2)
    assert metrics["tree/row_tokens"] == 4 + 2 * (2 + 3 + 2)


def test_a_plain_sequence_trains_where_it_is_told_to() -> None:
    tree = sequence_tree("s", [1, 2, 3, 4, 5], [False, True, True, False, True])
    assert [(node.token_ids, node.sampled, node.start) for node in tree.nodes] == [
        ((1,), False, 0),
        ((2, 3), True, 1),
        ((4,), False, 3),
        ((5,), True, 4),
    ]
    row = build_sft_step(0, [tree], SETTINGS).rows[0]
    assert row.sampled_BT.tolist() == [[False, True, True, False, True]]


def test_imitation_takes_every_tree_that_has_a_draw() -> None:
    batch = build_sft_step(0, [plant(context(1, below=[draw(2)])), plant(context(1))], SETTINGS)
    assert weights_by_rollout(batch) == {0: [1.0]}
